"""Request seeds."""
import hashlib
import itertools

from mrl.data.seeds import request_seed


def test_it_is_the_documented_hash():
    digest = hashlib.sha256(b"1:2:3:4").digest()
    assert request_seed(1, 2, 3, 4) == int.from_bytes(digest[:4], "big") % 2**31


def test_it_is_in_range_and_tells_all_arguments_apart():
    seeds = [request_seed(*arguments) for arguments in itertools.product(range(2), range(5), range(20), range(8))]
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert len(set(seeds)) == len(seeds)
    # Digits must not run into each other: 1|23 is not 12|3.
    assert request_seed(0, 1, 23, 0) != request_seed(0, 12, 3, 0)
