"""What tools/bench_sync.py measures mrl's syncs against: the same bytes, sent as others do."""
