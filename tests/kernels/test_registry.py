"""The one way to choose: None takes the best that can do the call, a named choice is taken or refused."""

import functools
import types

import jax
import jax.numpy as jnp
import pytest

from kvjax.compat import traced_for
from pallas_kernels import jax_triton_adapter, registry

H200 = functools.partial(traced_for, "NVIDIA H200", 132, "cuda")
X = jnp.arange(6.0)
JAX = jax.__version__


@pytest.fixture(autouse=True)
def doubled(monkeypatch):
    """An operation with every implementation; each marks its output with what it is."""

    def module(mark, **more):
        return types.SimpleNamespace(doubled=lambda x, *, by, **_: x * by + mark, **more)

    def long_rows(x, *, by):
        return f"rows of {x.shape[0]} are too long to be multiplied by {by}" if x.shape[0] > 5 else None

    modules = {
        "xla": module(0),
        "triton": module(1),
        "pallas_triton": module(2),
        "mosaic": module(3, unsupported=long_rows),
    }
    monkeypatch.setitem(registry.TABLE, "doubled", {name: f"{name}:doubled" for name in modules})
    monkeypatch.setattr(registry, "_module", modules.__getitem__)
    # These have no kernel in them, so jax-triton need not work with the installed JAX.
    reason = jax_triton_adapter._why_not  # of a version of JAX
    monkeypatch.setattr(
        jax_triton_adapter, "_why_not", lambda jax_version: None if jax_version == JAX else reason(jax_version)
    )
    return modules


def refuse(monkeypatch, module):
    monkeypatch.setattr(module, "unsupported", lambda x, *, by: "it is not made for this", raising=False)


def best():
    return registry.best("doubled", X, by=2)


def test_none_is_xla_on_a_cpu_and_the_first_kernel_that_can_on_a_gpu(monkeypatch, doubled):
    assert best() == "xla"
    assert registry.call("doubled", None, False, X, by=2).tolist() == (X * 2).tolist()
    with H200():
        assert best() == "triton"
        refuse(monkeypatch, doubled["triton"])
        assert best() == "pallas_triton"
        refuse(monkeypatch, doubled["pallas_triton"])
        assert registry.best("doubled", X[:5], by=2) == "mosaic"
        assert best() == "xla"  # rows of 6 are too long


def test_none_passes_over_triton_where_jax_triton_is_off(monkeypatch):
    monkeypatch.setattr(jax, "__version__", "0.12.0.2")
    with H200():
        assert best() == "pallas_triton"
        assert "triton" not in registry.available("doubled")
        with pytest.raises(ValueError, match=r"'triton' cannot be used: .* JAX 0\.12\.0\.2.*choose one of 'xla'"):
            registry.call("doubled", "triton", False, X, by=2)


def test_none_passes_over_triton_on_a_gpu_that_it_does_not_know():
    with traced_for("NVIDIA Imaginary 1", 10, "cuda"):
        assert best() == "pallas_triton"
        with pytest.raises(ValueError, match=r"Imaginary 1.*add it to CAPABILITIES"):
            registry.call("doubled", "triton", False, X, by=2)


@pytest.mark.parametrize(("name", "mark"), [("xla", 0), ("triton", 1), ("pallas_triton", 2)])
def test_a_named_implementation_is_taken(name, mark):
    with H200():
        out = registry.call("doubled", name, False, X, by=2)
    assert out.tolist() == (X * 2 + mark).tolist()


@pytest.mark.parametrize(
    ("name", "interpret", "reason"),
    [
        ("triton", False, "'triton' needs an NVIDIA GPU and the platform is 'cpu'; choose 'xla', or None"),
        ("pallas_triton", False, "the platform is 'cpu'; choose .xla., or None.*interpret=True"),
        ("mosaic", True, "'mosaic' cannot be used: rows of 6 are too long to be multiplied by 2; choose"),
        ("triton", True, "interpret=True is for Pallas kernels, not for 'triton'"),
        ("cuda", False, "'cuda' is not one of xla, triton, pallas_triton, mosaic"),
    ],
)
def test_a_named_implementation_that_cannot_is_refused_with_the_reason(name, interpret, reason):
    with pytest.raises(ValueError, match=reason):
        registry.call("doubled", name, interpret, X, by=2)


def test_an_operation_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="no operation 'halved'; there are alloc_decode"):
        registry.call("halved", None, False, X)


def test_triton_falls_back_to_xla_under_vmap_when_it_was_not_named():
    def program(x):
        return registry.call("doubled", None, False, x, by=2)

    with H200():
        alone = str(jax.make_jaxpr(program)(X))
        many = str(jax.make_jaxpr(jax.vmap(program))(X[:, None]))
    assert " 1.0:f32" in alone  # the mark of the Triton module
    assert " 1.0:f32" not in many
