"""The training loop, top to bottom: experience (prompts, noisy rollout, rewards) -> updates -> metrics -> checkpoint.

A run is a function of its config. All randomness comes from (seed, rollout number, a prompt's place in the data
order), and checkpoints are written between rollouts, so a run that dies at any instant and is started again goes on
from the last checkpoint to bitwise the same end.
"""

import contextlib
import json
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from qerl_jax import run_folder, run_options
from qerl_jax.checkpoints import remove_partial, restore_checkpoint, save_checkpoint
from qerl_jax.compiled import compiled_programs, compiled_together
from qerl_jax.config import Config
from qerl_jax.config_files import effective_options
from qerl_jax.durable import make_folder, refuse_no_folder, write_whole
from qerl_jax.errors import UserError, check_kind
from qerl_jax.evaluation import evaluate
from qerl_jax.interrupt import Interrupted, interrupt_flag
from qerl_jax.live_line import LiveLine
from qerl_jax.metrics import MetricsWriter, read_rows, truncate_after, warn_of_missing_rows
from qerl_jax.models.peft import save_adapter
from qerl_jax.plots import plot_runs
from qerl_jax.policy import kernels_said
from qerl_jax.rewards.combine import RewardFunctions
from qerl_jax.rewards.loading import refuse_while_importing
from qerl_jax.rl.advantages import AdvantageFn
from qerl_jax.rl.assembly import Experiment, assemble, held_out, initial_adapter
from qerl_jax.rl.experience import Collector
from qerl_jax.rl.learner import Learner
from qerl_jax.rl.losses import LossFn
from qerl_jax.rl.own_functions import NO_FUNCTIONS, OwnFunctions
from qerl_jax.rl.plan import compiled_run, evaluation_programs
from qerl_jax.rl.saved import Saved
from qerl_jax.rl.update import joined_metrics
from qerl_jax.run_files import ADAPTER, CHECKPOINTS, COMPILED, COMPLETIONS, CONFIG, METRICS, PLOTS, SUMMARY
from qerl_jax.summary import report
from qerl_jax.unread import going_on_unread

# Streams of the run's root key; `evaluation.STREAM` is another one.
_INIT, _ROLLOUTS = 0, 1


def train(
    config: Config,
    *,
    fresh: bool = False,
    profile: str | None = None,
    loss_fn: LossFn | None = None,
    advantage_fn: AdvantageFn | None = None,
) -> Path:
    """Trains to the end, or from where an earlier run of the same config stopped.

    A run does not end because nobody reads what it prints any more (`qerl train | head`), or because its log cannot be
    written, as on a full disk. A script that holds a reward function of the run, too, is imported by the function's
    worker, and calls this under `if __name__ == "__main__":`.

    Args:
      config: see `qerl_jax.config_files.load_config`.
      fresh: start over in a folder beside an existing one.
      profile: folder for a JAX profiler trace of the second rollout of this process (the only one, if one is left).
      loss_fn, advantage_fn: functions of your own, as `update_step` takes them, which replace the options of grpo that
        say how loss and advantages are computed. Advantages are computed for a whole rollout at once. grpo.beta still
        has one effect: if it is not 0, the loss is given the reference's log-probabilities. A run can only be continued
        with the functions that it began with, which are recognized by their source (see `own_functions`).

    Returns:
      The run folder.

    Raises:
      UserError: bad input, by name, or the run folder was moved meanwhile. Interrupted: after Ctrl-C, SIGTERM or
        SIGHUP, with the state saved.
    """
    refuse_while_importing()
    check_kind("config", config, Config, " (`load_config` reads one)")
    with _letting_go():
        return _train(config, fresh, profile, OwnFunctions(loss_fn, advantage_fn))


@contextlib.contextmanager
def _letting_go() -> Iterator[None]:
    """Clears the frames of an error that says all in its message. A notebook keeps its last error, and with the frames
    the model, beside which the run may have no room when the cell is run again."""
    done = {id(sys.exception())}  # what the caller handles, if anything, is the caller's
    try:
        yield
    except (UserError, KeyboardInterrupt, jax.errors.JaxRuntimeError) as error:  # the last where memory runs out
        left: list[BaseException | None] = [error]
        while left:
            one = left.pop()
            if one is not None and id(one) not in done:
                done.add(id(one))
                traceback.clear_frames(one.__traceback__)
                left += [one.__cause__, one.__context__]
        raise


def _train(config: Config, fresh: bool, profile: str | None, own: OwnFunctions) -> Path:
    unread = "nothing more can be written to the output; the run goes on, and its metrics go on in"
    functions = own.identity()  # with its checks, before a folder is made
    if profile is not None:  # or the run would end where the trace is to be written
        try:
            refuse_no_folder(Path(profile))
        except UserError as error:
            raise UserError(f"profile (--profile): {error}") from None
    try:
        with (
            run_folder.open_run(config, fresh) as (folder, config),
            run_folder.held(folder) as check_folder,
            going_on_unread(f"{unread} {folder / METRICS}"),
            compiled_programs(folder / COMPILED),
            interrupt_flag() as interrupt,
            contextlib.ExitStack() as opened,
        ):
            if profile is not None:  # no earlier: it may lie in the run's folder, which would be refused with it alone
                make_folder(Path(profile))
            with _as_interruption(interrupt):
                rewards = opened.enter_context(RewardFunctions(config.reward, config.generation.max_completion_length))
                experiment = assemble(config, rewards, own)
            return _Run(experiment, rewards, folder, check_folder, interrupt, profile).run()
    except run_folder.RunFinished as finished:
        assert config.run.output_dir is not None
        folder = Path(config.run.output_dir)
        run_folder.refuse_other_functions(folder, functions)
        print(finished)
        return folder


@contextlib.contextmanager
def _as_interruption(interrupt: list[int]) -> Iterator[None]:
    """An error before anything is computed, behind a signal that stops the run. A scheduler may send that to each
    process of a job, so that reward functions end by it too."""
    try:
        yield
    except UserError as error:
        if not interrupt:
            raise
        raise Interrupted(
            f"{error}\nstopped before anything was computed: start it again by the same command"
        ) from error


class _Run:
    """One process's share of a run. What must survive the process is in `state` and `progress`."""

    def __init__(
        self,
        experiment: Experiment,
        rewards: RewardFunctions,
        folder: Path,
        check_folder: Callable[[], None],
        interrupt: list[int],
        profile: str | None,
    ) -> None:
        self.experiment, self.rewards, self.folder = experiment, rewards, folder
        self.check_folder, self.interrupt, self.profile = check_folder, interrupt, profile
        self.collector = Collector(experiment, rewards)
        self.config = experiment.config
        self.learner = Learner(experiment)
        self._begin_or_resume()

    def _begin_or_resume(self) -> None:
        self.check_folder()
        root = jax.random.key(self.config.run.seed)
        adapter = initial_adapter(self.config, self.experiment.policy.model, jax.random.fold_in(root, _INIT))
        saved = Saved(self.learner.begin(adapter), root)
        identity = self.experiment.identity()
        remove_partial(self.folder / CHECKPOINTS)
        found = restore_checkpoint(self.folder / CHECKPOINTS, saved)
        if found is None:
            self.progress: dict[str, Any] = {
                "rollout": 0, "cursor": 0, "num_tokens": 0, "nonfinite": 0, "before": None
            }  # fmt: skip
        else:
            saved, self.progress, step = found
            run_folder.refuse_changed_identity(self.folder, self.progress["identity"], identity, step)
            print(f"continuing {self.folder} from step {step} of {self.experiment.total_steps}")
            run_folder.warn_of_earlier_version(self.progress, step)
            run_folder.warn_of_changed_rewards(self.progress.get("rewards", {}), self.rewards.sources, step)
        options = run_options.options_to_keep(self.config)
        self.progress |= {"identity": identity, "rewards": self.rewards.sources, run_options.OPTIONS: options}
        is_evaluated = self.progress["before"] is not None  # before training; else a row of it would come twice
        left = truncate_after(self.folder, self.progress["rollout"] if is_evaluated else -1)
        logged = self.progress["rollout"] if self.config.run.log_completions else 0
        warn_of_missing_rows(self.folder, left, int(saved.train.step), logged)
        self.state = saved.train
        self.root = saved.key
        self.saved_at = int(self.state.step) if found is not None else -1

    def run(self) -> Path:
        config, total = self.config, self.experiment.total_steps
        self.check_folder()
        with (
            MetricsWriter(
                self.folder, config.run.report_to, step=int(self.state.step), options=effective_options(config)
            ) as writer,
            contextlib.closing(LiveLine(total)) as live,
        ):
            self.writer, self.live = writer, live
            if said := kernels_said(self.experiment.policy.model):
                live.note(said)
            live.note("compiling")
            self._compile()
            if self.progress["before"] is None:
                self.progress["before"] = results = self._evaluate("before training")
                if config.evaluation.eval_steps is not None:
                    self._log_evaluation(results)
            if self.saved_at < 0:
                self._save()
            # Trace a rollout that compiles nothing, if more than one is left.
            rollouts_left = (total - int(self.state.step)) / config.updates_per_rollout
            traced = self.progress["rollout"] + (1 if rollouts_left > 1 else 0)
            measured = self._evaluate_if_due(self._evaluated_to())
            learned = dict(self.progress)  # as of the rollout that made the newest step
            while int(self.state.step) < total:
                self._stop_if_interrupted()
                first_step = int(self.state.step)
                tracing = self.profile is not None and self.progress["rollout"] == traced
                with jax.profiler.trace(str(self.profile)) if tracing else contextlib.nullcontext():
                    rows = self._one_rollout()
                    self.check_folder()
                    with self._saved_if_it_fails():
                        writer.log(*rows)
                    for row in rows:
                        live.update(row)
                        if row["nonfinite"]:
                            live.note(f"step {row['step']}: loss or gradient is not finite; this update was refused")
                step = int(self.state.step)
                if step > first_step:
                    learned = dict(self.progress)
                self._stop_if_never_finite(learned)
                if _reached(config.run.save_steps, first_step, step):
                    self._save()  # before an evaluation, which may take long
                measured = self._evaluate_if_due(first_step)
            self._save()
            after = measured or self._evaluate("after training")
        return self._finish(after)

    def _compile(self) -> None:
        """Compiles what is left to be called, before anything is sampled, and says what it takes."""
        if int(self.state.step) == self.experiment.total_steps:
            compiled_together(evaluation_programs(self.experiment, self.state))
        else:
            self.live.note(str(compiled_run(self.experiment, self.collector, self.learner, self.state, self.root)))

    def _one_rollout(self) -> list[dict[str, Any]]:
        """Samples, scores, updates; returns a metrics row per optimizer step."""
        config, number = self.config, self.progress["rollout"]
        began = time.perf_counter()
        key = jax.random.fold_in(jax.random.fold_in(self.root, _ROLLOUTS), number)
        with self._saved_if_it_fails():
            found = self.collector.collect(self.state, key, self.progress["cursor"])
        rows = []
        for part in self.learner.parts(self.learner.batch(self.state, found)):
            at = int(self.state.step)
            self.state, row = self.learner.step(self.state, part)
            self.progress["nonfinite"] = self.progress["nonfinite"] + 1 if row["nonfinite"] else 0
            rows.append((row, {"step": at + 1, "learning_rate": float(self.learner.learning_rate(at))}))
            # Refused updates leave rollouts and steps out of phase, so the last step may come amid a rollout.
            ended = int(self.state.step) == self.experiment.total_steps
            if ended or self.progress["nonfinite"] >= config.run.max_nonfinite_steps:
                break
        self.progress |= {
            "rollout": number + 1,
            "cursor": found.cursor,
            "num_tokens": self.progress["num_tokens"] + found.num_tokens,
        }
        seconds = time.perf_counter() - began
        times = {
            "step_time": seconds / len(rows),
            "perf/rollout_time": found.rollout_time,
            "perf/reward_time": found.reward_time,
            "perf/update_time": seconds - found.rollout_time - found.reward_time,
            "perf/throughput": found.completion_tokens / seconds,
            "perf/peak_memory": peak_memory(),
        }
        epoch = self.progress["cursor"] / len(self.experiment.dataset)
        counts = {"rollout": number, "epoch": epoch, "num_tokens": self.progress["num_tokens"]}
        of_rollout = found.metrics | counts | times
        with self._saved_if_it_fails():
            if config.run.log_completions:
                self.writer.log_completions({"rollout": number} | row for row in found.rows())
            return [joined_metrics(row, of_rollout | of_step, "the run") for row, of_step in rows]

    @contextlib.contextmanager
    def _saved_if_it_fails(self, anew: bool = False) -> Iterator[None]:
        """Saves where a function of the user's, a service or the writing of a row fails, or updates are not finite, so
        that nothing learned is lost. For `anew` see `_save`."""
        try:
            yield
        except UserError as error:
            if self.saved_at < 0 and not self.interrupt:  # nothing was
                raise
            try:
                self._save(anew)
            except UserError as unsaved:
                raise UserError(f"{error}\n{unsaved}") from error
            kind = Interrupted if self.interrupt else UserError  # see `_as_interruption`
            raise kind(f"{error}\n{self._saved()}") from error

    def _stop_if_interrupted(self) -> None:
        if self.interrupt:
            self._save()
            raise Interrupted(self._saved())

    def _saved(self) -> str:
        continuing = f"`{run_folder.continuing(self.folder)}` continues it"
        if self.experiment.own != NO_FUNCTIONS:
            continuing = f"`train` of {self.folder / CONFIG}, with the same functions, continues it"
        return f"saved at step {self.saved_at} of {self.experiment.total_steps}; {continuing}"

    def _stop_if_never_finite(self, learned: dict[str, Any]) -> None:
        """Stops the run if too many updates in a row were refused.

        It is saved with `learned`, the progress as of its newest step. Rollouts since then led to no update and are
        sampled again when the run is continued; by then a reward function may have been corrected, so refused updates
        are counted from 0.
        """
        streak, last = self.progress["nonfinite"], self.progress["rollout"] - 1
        if streak < self.config.run.max_nonfinite_steps:
            return
        self.progress = learned | {"nonfinite": 0}
        finite = all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(self.state))
        counted = learned["nonfinite"] > 0  # by the checkpoint of this step too, if there is one
        with self._saved_if_it_fails(anew=counted) if finite else contextlib.nullcontext():
            raise UserError(
                f"the loss or a gradient was not finite in {streak} updates in a row, at step "
                f"{int(self.state.step) + 1} (rollout {last}), and none of these was made. Look for extreme rewards in "
                f"{self.folder / COMPLETIONS}, and correct the reward function before the run is continued, with "
                f"the same completions from rollout {learned['rollout']} on (a loss of your own can be changed before "
                f"the first step); in another run, by {run_folder.FRESH} or "
                "run.output_dir=NAME, lower optimizer.learning_rate or optimizer.max_grad_norm, or leave model.dtype "
                "float16, if that is it: its numbers end at 65504"
            )

    def _evaluated_to(self) -> int:
        """The step up to which all evaluations that were due have been made. The last one is missing if it failed: the
        state was saved before it."""
        rows = [row for row in read_rows(self.folder / METRICS) if row["rollout"] == self.progress["rollout"] - 1]
        evaluated = any(name.startswith("eval/") for row in rows for name in row)
        return int(self.state.step) if evaluated or not rows else int(rows[0]["step"]) - 1

    def _evaluate_if_due(self, before: int) -> dict[str, Any] | None:
        """Evaluates, and writes a row of it, if the rollout just trained on reached a multiple of eval_steps."""
        step = int(self.state.step)
        if not _reached(self.config.evaluation.eval_steps, before, step):
            return None
        results = self._evaluate(f"at step {step}")
        self._log_evaluation(results)
        return results

    def _log_evaluation(self, results: dict[str, Any]) -> None:
        """As a row of the newest step, and of its rollout; before training of step 0 and rollout -1."""
        row = {"step": int(self.state.step), "rollout": self.progress["rollout"] - 1}
        for mode, prefix in (("sampled", "eval/"), ("greedy", "eval/greedy/")):
            row |= {prefix + name: value for name, value in results[mode].items()}
        with self._saved_if_it_fails():
            self.writer.log(row)

    def _evaluate(self, when: str) -> dict[str, Any]:
        self._stop_if_interrupted()
        self.live.note(f"evaluating {when}, on held-out problems of {self.config.evaluation.eval_dataset}")
        experiment, seed = self.experiment, self.config.run.seed
        examples = held_out(self.config, experiment.evaluation_data)
        with self._saved_if_it_fails():
            return evaluate(self.config, experiment.policy, self.state.adapter, self.rewards, examples, seed)

    def _save(self, anew: bool = False) -> None:
        """Saves a step that is not saved yet; `anew` replaces its checkpoint, which has another progress."""
        self.check_folder()
        step = int(self.state.step)
        if step == self.saved_at and not anew:
            return
        self.writer.sync()
        save_checkpoint(
            self.folder / CHECKPOINTS,
            step,
            Saved(self.state, self.root),
            self.progress,
            save_total_limit=self.config.run.save_total_limit,
        )
        self.saved_at = step

    def _finish(self, after: dict[str, Any]) -> Path:
        self.check_folder()
        before = self.progress["before"]
        save_adapter(
            self.state.adapter,
            self.folder / ADAPTER,
            self.config.model.model_name_or_path,
            weight_format=self.experiment.policy.rounded_to,
        )
        summary = {
            "steps": int(self.state.step),
            "seed": self.config.run.seed,
            "device": jax.devices()[0].device_kind,
            "identity": self.progress["identity"],
            "rewards": self.progress["rewards"],
            run_options.OPTIONS: self.progress[run_options.OPTIONS],
            "before": before,
            "after": after,
        }
        plot_runs([self.folder], self.folder / PLOTS, summary)
        write_whole(self.folder / SUMMARY, json.dumps(summary, indent=1) + "\n")
        configured = self.experiment.own == NO_FUNCTIONS
        print(report(self.folder, summary, self.config.evaluation.eval_dataset, configured))
        return self.folder


def _reached(every: int | None, before: int, step: int) -> bool:
    """Whether the steps from `before` to `step` have come to a multiple of `every`; None has none."""
    return every is not None and step // every > before // every


def peak_memory() -> float:
    """GB: the device's peak where it keeps count, else the process's."""
    stats = jax.devices()[0].memory_stats() or {}
    scale = 1 if sys.platform == "darwin" else 1024
    return stats.get("peak_bytes_in_use", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale) / 1e9
