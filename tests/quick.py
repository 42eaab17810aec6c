"""XLA's options for programs that compile far longer than they run, in one place."""

from importlib.metadata import version

FAST_COMPILE: dict[str, int | bool] = {"xla_backend_optimization_level": 0}
# An unknown option is an error, and from JAX 0.11 on there are no other emitters of fusions left to choose.
if tuple(int(part) for part in version("jax").split(".")[:2]) < (0, 11):
    FAST_COMPILE["xla_cpu_use_fusion_emitters"] = False

# The same for a whole process, as XLA_FLAGS has it.
FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in FAST_COMPILE.items())
