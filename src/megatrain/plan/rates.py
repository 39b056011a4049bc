"""What a machine moves and computes per second: known GPUs, links by PCIe generation, host memory by cores.

Peaks are dense bf16 with fp32 accumulation from the vendors' data sheets. What is reached of them was measured on
one machine (benchmarks/h200.md) and is assumed of the others.
"""

from __future__ import annotations

from dataclasses import dataclass

MATMUL_SHARE = 0.70
"""Of the peak, in the products of whole layers. Measured on an H200: 690 of 989 TFLOP/s."""
ATTENTION_SHARE = 0.50
"""Of the peak, in fused causal attention: 400 to 650 of 989 on an H200, by length."""
MEMORY_SHARE = 0.80
"""Of the device memory's stated rate, in element-wise kernels."""
PCIE_BYTES = {3: 12.3e9, 4: 25.0e9, 5: 55.0e9}
"""One way, x16, page-locked. Generation 5 is measured; 3 and 4 are the usual results of bandwidth tests."""
DUPLEX_SHARE = 0.93
"""Of the one-way rate, each way, when both directions are busy: 51 of 55 GB/s measured."""
CORE_BYTES = 10e9
"""What one thread's AdamW moves, until the memory is busy."""
HOST_BYTES = 131e9
"""What 14 threads' AdamW moved beside a busy link on a host with DDR5; a desktop with two channels has half."""
CPU_CORE_FLOPS = 30e9
"""fp32 of one core in matrix products: for runs without a GPU."""


@dataclass(frozen=True)
class Gpu:
    """A line of the vendor's data sheet."""

    name: str  # as in the driver's name for it
    peak_flops: float  # dense bf16, fp32 accumulation
    memory_bytes: float  # per second
    pcie: int


# The longer name stands first where one contains the other.
GPUS = (
    Gpu("B300", 2250e12, 8.0e12, 5),
    Gpu("B200", 2250e12, 8.0e12, 5),
    Gpu("GH200", 989e12, 4.0e12, 5),
    Gpu("H200 NVL", 836e12, 4.8e12, 5),
    Gpu("H200", 989e12, 4.8e12, 5),
    Gpu("H100 NVL", 835e12, 3.9e12, 5),
    Gpu("H100 PCIe", 756e12, 2.0e12, 5),
    Gpu("H100", 989e12, 3.35e12, 5),
    Gpu("A100", 312e12, 1.9e12, 4),
    Gpu("A40", 149.7e12, 0.696e12, 4),
    Gpu("A30", 165e12, 0.933e12, 4),
    Gpu("A10G", 70e12, 0.6e12, 4),
    Gpu("A10", 125e12, 0.6e12, 4),
    Gpu("L40S", 362e12, 0.864e12, 4),
    Gpu("L40", 181e12, 0.864e12, 4),
    Gpu("L4", 121e12, 0.3e12, 4),
    Gpu("RTX PRO 6000 Blackwell", 503e12, 1.79e12, 5),
    Gpu("RTX 6000 Ada", 364e12, 0.96e12, 4),
    Gpu("RTX A6000", 154.8e12, 0.768e12, 4),
    Gpu("RTX 5090", 209.5e12, 1.79e12, 5),
    Gpu("RTX 5080", 112.6e12, 0.96e12, 5),
    Gpu("RTX 4090", 165.2e12, 1.008e12, 4),
    Gpu("RTX 4080", 97.5e12, 0.717e12, 4),
    Gpu("RTX 3090 Ti", 80e12, 1.008e12, 4),
    Gpu("RTX 3090", 71e12, 0.936e12, 4),
    Gpu("RTX 3080", 59.5e12, 0.76e12, 4),
)
OTHERWISE = frozenset({"LAPTOP", "MAX", "MIG"})
"""Words after which a name is not the card of the data sheet but a slower one, or a part of it."""
UNKNOWN_GPU = Gpu("an unknown GPU", 100e12, 0.8e12, 4)


@dataclass(frozen=True)
class Rates:
    """FLOP and bytes per second that are reached, and where the figures come from."""

    name: str  # of what computes
    peak_flops: float | None  # None where no data sheet is known
    matmul_flops: float
    attention_flops: float
    device_bytes: float  # the device's own memory
    link_in_bytes: float  # host -> device
    link_out_bytes: float
    link_duplex_bytes: float  # each way, when both are busy
    host_bytes: float  # AdamW's reads and writes
    cores: int
    source: str  # for people: what was assumed


def known_gpu(name: str) -> Gpu | None:
    """The data sheet of a GPU by the driver's name ("NVIDIA H200"); None if there is none here."""
    words = name.replace("-", " ").upper().split()
    if OTHERWISE.intersection(words):
        return None
    for gpu in GPUS:
        wanted = gpu.name.upper().split()
        if any(words[i : i + len(wanted)] == wanted for i in range(len(words))):
            return gpu
    return None


def named_gpu(name: str) -> Gpu | None:
    """As a person names it: "4090" and "A6000" are cards of the RTX line. None if there is none here."""
    return known_gpu(name) or known_gpu(f"RTX {name}")


def assumed_rates(
    gpu: str | None, *, cores: int, link_bytes: float | None = None, host_bytes: float | None = None
) -> Rates:
    """Rates of a machine that nobody measured. gpu: the driver's name, None for runs on the CPU.

    link_bytes, host_bytes: bytes per second where they are known, of the link one way and of the host's memory.
    """
    host = host_bytes or min(HOST_BYTES, cores * CORE_BYTES)
    moved = "stated" if host_bytes else f"assumed for {cores} cores"
    if gpu is None:
        flops = cores * CPU_CORE_FLOPS
        source = f"products {flops / 1e9:.0f} GFLOP/s, and AdamW moves {host / 1e9:.0f} GB/s of memory, {moved}"
        return Rates("CPU", None, flops, flops, host, host, host, host / 2, host, cores, source)
    sheet = known_gpu(gpu)
    card = sheet or UNKNOWN_GPU
    link = link_bytes or PCIE_BYTES[card.pcie]
    origin = "data sheet" if sheet else "a guess: this GPU is not in the table"
    crossed = "stated" if link_bytes else f"PCIe {card.pcie} x16 assumed"
    return Rates(
        name=gpu,
        peak_flops=sheet.peak_flops if sheet else None,
        matmul_flops=MATMUL_SHARE * card.peak_flops,
        attention_flops=ATTENTION_SHARE * card.peak_flops,
        device_bytes=MEMORY_SHARE * card.memory_bytes,
        link_in_bytes=link,
        link_out_bytes=link,
        link_duplex_bytes=DUPLEX_SHARE * link,
        host_bytes=host,
        cores=cores,
        source=(
            f"{MATMUL_SHARE:.0%} of {card.peak_flops / 1e12:.0f} TFLOP/s ({origin}), "
            f"link {link / 1e9:.0f} GB/s ({crossed}), AdamW moves {host / 1e9:.0f} GB/s of host memory ({moved})"
        ),
    )
