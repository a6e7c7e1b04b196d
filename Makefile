# make quickstart   train the shipped 1M-parameter policy with 4-bit weights, on the CPU, in minutes
# make test         all tests but those marked slow or gpu
# make check        lint, formatting, types
# make clean        remove .venv and caches (never runs/)
# Each makes .venv first when there is none; TEST_ARGS="-k noise" goes to pytest, ARGS="run.seed=1" to qerl train.

PYTHON := .venv/bin/python

.PHONY: quickstart test check clean

quickstart: .venv/.installed
	$(PYTHON) -m qerl_jax.cli train quickstart $(ARGS)

test: .venv/.installed
	$(PYTHON) -m pytest -n 2 --dist loadfile $(TEST_ARGS)

check: .venv/.installed
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

.venv/.installed: pyproject.toml constraints.txt scripts/make_venv.sh
	@sh scripts/make_venv.sh

clean:
	rm -rf .venv .cache .pytest_cache .mypy_cache .ruff_cache build dist
	find qerl_jax tests -name __pycache__ -type d -prune -exec rm -rf {} +
