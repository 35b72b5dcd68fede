"""Stands in for SGLang's kernel package on a CPU: the names that SGLang imports unconditionally, and no others.

SGLang finds none of its real operators under `torch.ops.sgl_kernel`, and so takes its plain torch code everywhere else.
"""
import torch

__version__ = "0.0.0"


def assign_req_to_token_pool_cpu(requests: torch.Tensor, table: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor,
                                 locations: torch.Tensor, _width: int) -> None:
    """table[requests[i], starts[i]:ends[i]] = the next ends[i] - starts[i] of `locations`. All integers."""
    taken = 0
    for request, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist()):
        table[request, start:end] = locations[taken:taken + end - start].to(table.dtype)
        taken += end - start


def _speculative(name: str):
    def refuse(*_, **__):
        raise NotImplementedError(f"sgl_kernel.{name}: speculative decoding is not available in a CPU engine")
    return refuse


assign_draft_cache_locs_contiguous_cpu = _speculative("assign_draft_cache_locs_contiguous_cpu")
assign_extend_cache_locs_cpu = _speculative("assign_extend_cache_locs_cpu")
build_tree_kernel_efficient_cpu = _speculative("build_tree_kernel_efficient_cpu")
copy_all_layer_kv_cache_cpu = _speculative("copy_all_layer_kv_cache_cpu")
fill_accept_out_cache_loc_cpu = _speculative("fill_accept_out_cache_loc_cpu")
fill_bonus_tokens_cpu = _speculative("fill_bonus_tokens_cpu")
verify_tree_greedy_cpu = _speculative("verify_tree_greedy_cpu")
