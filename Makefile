# make quickstart   train the shipped 1M-parameter policy with 4-bit weights, on the CPU, in minutes
# make test         all tests but those marked slow, gpu or interop
# make test-interop the tests that exchange folders with transformers, PEFT and compressed-tensors, in .venv-interop
# make check        lint, formatting, types
# make clean        remove .venv, .venv-interop and caches (never runs/)
# Each makes its environment first when there is none; TEST_ARGS="-k noise" goes to pytest, ARGS="run.seed=1" to train.

PYTHON := .venv/bin/python

.PHONY: quickstart test test-interop check clean

quickstart: .venv/.installed
	$(PYTHON) -m qerl_jax train quickstart $(ARGS)

test: .venv/.installed
	$(PYTHON) -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(TEST_ARGS)

test-interop: .venv/.installed .venv-interop/.installed
	INTEROP_PYTHON=.venv-interop/bin/python $(PYTHON) -m pytest -m interop tests/interop $(TEST_ARGS)

check: .venv/.installed
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

.venv/.installed: pyproject.toml constraints.txt scripts/make_venv.sh
	@sh scripts/make_venv.sh

.venv-interop/.installed: tests/interop/requirements.txt scripts/make_interop_venv.sh
	@sh scripts/make_interop_venv.sh

clean:
	rm -rf .venv .venv-interop .cache .pytest_cache .mypy_cache .ruff_cache build dist
	find qerl_jax pallas_kernels benchmarks examples tests -name __pycache__ -type d -prune -exec rm -rf {} +
