import pytest

from pallas_kernels.triton_versions import check_versions


@pytest.mark.parametrize("pair", [("0.4.1", "3.7.1"), ("0.4.0", "3.10.0+git"), ("0.10.0", "4.0.0")])
def test_pairs_that_work(pair):
    check_versions(*pair)


@pytest.mark.parametrize("pair", [("0.4.1", "3.6.0"), ("0.4.0", "3.6.0+rocm"), ("0.10.0", "3.5.1")])
def test_a_pair_that_does_not_is_named_with_what_to_take(pair):
    with pytest.raises(ImportError, match=rf"jax-triton {pair[0]} needs triton 3.7 or newer, found {pair[1][:3]}"):
        check_versions(*pair)


@pytest.mark.parametrize("triton", ["3.6.0", "3.7.1"])
def test_a_jax_triton_that_is_too_old(triton):
    with pytest.raises(ImportError, match=r"jax-triton 0.3.1 is too old: take 0.4.1, with triton 3.7"):
        check_versions("0.3.1", triton)
