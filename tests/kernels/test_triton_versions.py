import pytest

from pallas_kernels.triton_versions import check_versions


@pytest.mark.parametrize("versions", [
    ("0.4.1", "3.7.1", "0.11.2"), ("0.4.0", "3.10.0+git", "0.11.2.dev1"), ("0.4.2", "3.7.1", "0.12.0.1"),
    ("0.10.0", "4.0.0", "0.12.0"),
])  # fmt: skip
def test_what_works(versions):
    check_versions(*versions)


@pytest.mark.parametrize("pair", [("0.4.1", "3.6.0"), ("0.4.0", "3.6.0+rocm"), ("0.10.0", "3.5.1")])
def test_a_triton_that_is_too_old(pair):
    with pytest.raises(ImportError, match=rf"jax-triton {pair[0]} needs triton 3.7 or newer, found {pair[1][:3]}"):
        check_versions(*pair, "0.11.2")


@pytest.mark.parametrize("triton", ["3.6.0", "3.7.1"])
def test_a_jax_triton_that_is_too_old(triton):
    with pytest.raises(ImportError, match=r"jax-triton 0.3.1 is too old: take 0.4.1, with triton 3.7"):
        check_versions("0.3.1", triton, "0.11.2")


@pytest.mark.parametrize("jax_triton", ["0.4.0", "0.4.1"])
def test_a_jax_that_is_too_new_for_it(jax_triton):
    message = rf"jax-triton {jax_triton} fails with JAX 0.12.0.1: take JAX 0.11, or a newer jax-triton"
    with pytest.raises(ImportError, match=message):
        check_versions(jax_triton, "3.7.1", "0.12.0.1")
