"""What differs between the supported JAX versions, in one place. Public JAX APIs only."""

import contextlib

import jax


def traced_for(device_kind: str, cores: int | None, platform: str) -> contextlib.AbstractContextManager[object]:
    """A context in which programs are traced and lowered for a device that this machine need not have.

    device_kind: JAX's name of the device ("NVIDIA H200"). cores: its streaming multiprocessors, None for a CPU.
    platform: "cuda" or "cpu".

    JAX 0.10 asks for nothing of this kind; from 0.11 on Pallas' Triton lowering reads the device from here. In
    every version `pallas_kernels.registry` does. The function moved from jax.sharding to jax in 0.11.
    """
    device = jax.sharding.AbstractDevice(device_kind, cores, platform)
    use = getattr(jax, "use_abstract_mesh", None) or jax.sharding.use_abstract_mesh
    return use(jax.sharding.AbstractMesh((), (), abstract_device=device))
