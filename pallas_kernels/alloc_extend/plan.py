"""How the output of alloc_extend is cut into blocks, one for each program of its kernels."""

from pallas_kernels.arguments import power_of_two

COMPARISONS = 4_096  # tokens x lanes that one program compares: 32 per thread, which ptxas keeps in registers
WARPS = 4


def block_size(batch: int, capacity: int) -> int:
    """Output tokens per program: a power of two that is not larger than the output."""
    block = max(4, min(256, COMPARISONS // power_of_two(batch)))
    return min(block, power_of_two(capacity + 1) // 2)
