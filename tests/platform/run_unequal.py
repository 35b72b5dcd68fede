"""Under torchrun, 2 ranks: gathers and sums of parts of unequal size, one of them empty."""
import torch
import torch.distributed as dist

from tests.trainer.gang import gang

SIZES = [2, 0]

if __name__ == "__main__":
    with gang():
        from megatron.core.tensor_parallel import mappings

        rank, world = dist.get_rank(), dist.group.WORLD
        part = torch.arange(SIZES[rank] * 2.0).view(-1, 2) + 10 * rank
        whole = mappings._gather_along_first_dim(part, world, SIZES)
        assert whole.tolist() == [[0, 1], [2, 3]]
        assert torch.equal(mappings._reduce_scatter_along_first_dim(whole * (rank + 1), world, SIZES), part * 3)
        assert mappings._gather_along_first_dim(torch.ones(1), world).tolist() == [1, 1]
        assert mappings._reduce_scatter_along_first_dim(torch.ones(2), world).tolist() == [2]
        dist.barrier()
