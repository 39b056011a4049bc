"""The loop: batch, forward, loss, backward, norm, update, and round again while the update is still running.

The optimizer is not waited for at the end of a step. `submit` hands it the gradients, and the next step's
forward waits, layer by layer, for what it is about to read. Nor does a checkpoint stop the training: the saver
takes unit after unit of the state between the updates of two steps, and the trainer hears of it later. Only
the end needs all weights at rest, and drains the worker first.
"""

from __future__ import annotations

import time
from contextlib import suppress

from megatrain.optim.lr import learning_rate
from megatrain.optim.worker import OptimizerFailed
from megatrain.report.events import EvalReport, SaveReport, SkipReport, StepReport
from megatrain.report.journal import Journal
from megatrain.report.process import host_peak_bytes
from megatrain.stream.step import StepNumbers
from megatrain.train import nonfinite
from megatrain.train.checkpoint_writer import CheckpointWriter
from megatrain.train.gate import SaverFailed
from megatrain.train.intervals import Interval
from megatrain.train.locate import Fault, locate
from megatrain.train.notices import Notices
from megatrain.train.run import Run, StepRows
from megatrain.train.saver import Lost, Saver
from megatrain.train.signals import Interrupted, StopFlag
from megatrain.train.spikes import LossWatch
from megatrain.train.state import TrainState, step_seed


class Trainer:
    """Takes a run from `state` to its last step. `state` is always that of the last complete step."""

    def __init__(
        self,
        run: Run,
        *,
        state: TrainState,
        total_steps: int,
        journal: Journal,
        checkpoints: CheckpointWriter,
        stop: StopFlag,
    ) -> None:
        self.state = state
        self.total_steps = total_steps
        self.trained_s = 0.0  # in steps of this process; evaluation and checkpoints apart
        self.trained_tokens = 0
        self._run, self._journal, self._stop = run, journal, stop
        self._saver = Saver(checkpoints, gate=run.gate, stop=stop)
        self._train = run.recipe.train
        self._save_every = Interval(self._train.save_every)
        self._eval_every = Interval(self._train.eval_every)
        self._rows: StepRows | None = None  # of the next step, cut while the device was busy
        self._watch = LossWatch()
        self._skips = 0  # since the last finite step
        self._notices = Notices(
            journal.console,
            device=run.device,
            plan=run.plan,
            saves=self._train.save_every is not None,
            first_step=state.step,
        )
        # Begun or complete. Nothing is new yet: a fresh start has nothing to save, a resume has it on disk.
        self._saved_step: int | None = state.step
        self._lost = False  # the last checkpoint that was begun: another is due at once, and is waited for

    def train(self) -> None:
        """Raises Interrupted and NonFinite after saving what was reached; what the optimizer raised comes through."""
        console = self._journal.console
        console.begin(first_step=self.state.step + 1, total_steps=self.total_steps)
        self._stop.announce = console.note
        with self._stop.held():
            try:
                self._run_through()
            finally:
                self._come_to_rest()
        self._stop.check()

    def _run_through(self) -> None:
        try:
            self._loop()
        except Interrupted:  # between two layers: the weights are still those of the last complete step
            pass
        except (
            OptimizerFailed
        ):  # weights half updated are not saved; a checkpoint of the steps before may be whole soon
            self._run.gate.no_more_updates()
            self._hear(self._saver.wait())
            raise
        except SaverFailed:
            raise
        except (RuntimeError, MemoryError, OSError):  # device, memory, disk: the step that failed touched no weight
            self._save_now()
            raise
        begin_s = time.perf_counter()
        self._run.worker.drain()
        self.trained_s += time.perf_counter() - begin_s
        self._save_now()

    def _come_to_rest(self) -> None:
        """No thread of ours works on when the trainer is gone; a checkpoint that was begun is completed."""
        with suppress(OptimizerFailed):
            self._run.worker.drain()
        self._run.gate.no_more_updates()
        self._saver.close()

    def _loop(self) -> None:
        while True:
            self._hear(self._saver.poll())
            if self._evaluation_due():
                self._evaluate()
            if self._save_every.due(self.state) or self._lost:
                self._save()
            if self._stop.requested or self.state.step >= self.total_steps:
                return
            self._step()

    # -- one step -----------------------------------------------------------------------------------------

    def _step(self) -> None:
        run, state, begin_s = self._run, self.state, time.perf_counter()
        self._notices.before()
        rows = self._rows or run.loader.step_batch(state.epoch, state.index)
        lr = self._learning_rate(state.step + 1)
        seed = step_seed(self._train.seed, step=state.step + 1)
        output = run.executor.train_step(rows.micro_batches(run.plan.micro_batch), seed=seed)
        after = state.advanced(steps_in_epoch=run.loader.steps_in_epoch(state.epoch))
        self._rows = run.loader.step_batch(after.epoch, after.index) if after.step < self.total_steps else None
        numbers = output.result()
        if not numbers.finite and self._train.nonfinite != "ignore":
            fault = locate(output, rows=rows, micro_batch=run.plan.micro_batch, store=run.store)
            return self._nonfinite(numbers, fault=fault, rows=rows, after=after, lr=lr)
        clip = clip_factor(numbers.grad_norm, limit=self._train.max_grad_norm)
        # What is resident on the device is updated there, and saved as it was brought home: nobody waits for it.
        run.gate.submit(gradient.unit for gradient in output.gradients if gradient.resident is None)
        run.worker.submit(after.step, output.gradients, lr=lr, clip=clip)
        self.state = after.counted(tokens=rows.tokens, supervised_tokens=rows.supervised, loss=numbers.loss)
        self._skips = 0
        step_s = time.perf_counter() - begin_s
        self._report(numbers, rows=rows, lr=lr, step_s=step_s)
        self._notices.after(self.state.step, step_s=step_s, steps_left=self.total_steps - self.state.step)

    def _learning_rate(self, step: int) -> float:
        optimizer = self._run.recipe.optimizer
        return learning_rate(
            step,
            total=self.total_steps,
            lr=optimizer.lr,
            warmup=optimizer.warmup,
            schedule=optimizer.schedule,
            min_lr_ratio=optimizer.min_lr_ratio,
        )

    def _report(self, numbers: StepNumbers, *, rows: StepRows, lr: float, step_s: float) -> None:
        self.trained_s += step_s
        self.trained_tokens += rows.tokens
        step, usual = self.state.step, self._watch.exceeded(numbers.loss)
        if usual is not None:
            self._journal.console.warn(
                f"step {step}: the loss is {numbers.loss:.4f}, far above the {usual:.4f} of late"
            )
        if usual is None and step % self._train.log_every and step not in (1, self.total_steps):
            return
        self._journal.write(
            StepReport(
                step=step,
                epoch=self.state.epochs,
                time=time.time(),
                loss=numbers.loss,
                aux_loss=numbers.aux_loss,
                lr=lr,
                grad_norm=numbers.grad_norm,
                tokens=rows.tokens,
                supervised_tokens=rows.supervised,
                step_s=step_s,
                tokens_per_s=rows.tokens / step_s,
                optimizer_s=self._run.worker.last_update_s,
                exposed_optimizer_s=numbers.exposed_optimizer_s,
                exposed_transfer_s=numbers.exposed_transfer_s,
                vram_peak_bytes=self._run.device.memory_peak_bytes(),
                host_peak_bytes=host_peak_bytes(),
                loss_spike=usual,
                limit_share=self._limit_share(step_s, tokens=rows.tokens),
            )
        )

    def _limit_share(self, step_s: float, *, tokens: int) -> float | None:
        stick = self._run.yardstick
        if stick is None:
            return None
        return stick.measured(optimizer_s=self._run.worker.last_update_s).share(step_s=step_s, tokens=tokens)

    def _nonfinite(self, numbers: StepNumbers, *, fault: Fault, rows: StepRows, after: TrainState, lr: float) -> None:
        """The gradients stay where they are: no weight and no moment sees them."""
        reason = nonfinite.describe(numbers, fault=fault)
        if self._train.nonfinite == "stop":
            self._save_now()
            raise nonfinite.stopped(reason, state=self.state, step=after.step)
        self.state = after.counted(tokens=rows.tokens, supervised_tokens=rows.supervised, loss=None)
        self._journal.write(
            SkipReport(
                step=after.step,
                epoch=after.epochs,
                time=time.time(),
                loss=numbers.loss,
                grad_norm=numbers.grad_norm,
                lr=lr,
                tokens=rows.tokens,
                supervised_tokens=rows.supervised,
                reason=reason,
                rows=fault.rows,
                layers=fault.units,
            )
        )
        self._skips += 1
        if nonfinite.too_many(self._skips, state=self.state, total_steps=self.total_steps):
            self._save_now()
            raise nonfinite.given_up(reason, skips=self._skips, step=after.step)

    # -- between steps ------------------------------------------------------------------------------------

    def _evaluation_due(self) -> bool:
        """Also before the first step and after the last, so that a run shows what it changed."""
        at_end = self.state.step in (0, self.total_steps)
        return self.state.eval_step != self.state.step and (at_end or self._eval_every.due(self.state))

    def _evaluate(self) -> None:
        """Mean loss over the evaluation rows. An interrupt leaves it out: the resumed run makes up for it."""
        begin_s, loss, tokens = time.perf_counter(), 0.0, 0
        for number, group in enumerate(self._run.eval_batches):
            if self._stop.requested:
                return
            self._journal.console.progress("evaluating", done=number, total=len(self._run.eval_batches))
            group_loss, group_tokens = self._run.executor.evaluate(group)
            loss, tokens = loss + group_loss, tokens + group_tokens
        if not tokens:
            return
        self.state = self.state.evaluated(loss / tokens)
        self._eval_every.restart()
        self._journal.write(
            EvalReport(
                step=self.state.step,
                epoch=self.state.epochs,
                time=time.time(),
                loss=loss / tokens,
                supervised_tokens=tokens,
                eval_s=time.perf_counter() - begin_s,
            )
        )

    def _save(self) -> None:
        """Begin a checkpoint of `state`, unless the newest one is just that. One that is being written comes first:
        on a disk that is slower than the interval the training waits."""
        if self._saved_step == self.state.step:
            return
        self._hear(self._saver.wait())
        self._journal.sync()
        self._run.executor.bring_home()
        self._saver.begin(self.state, patient=self._lost)
        self._saved_step, self._lost = self.state.step, False
        self._save_every.restart()

    def _save_now(self) -> None:
        """A complete checkpoint of `state`; the optimizer is at rest, or will be."""
        self._save()
        self._hear(self._saver.wait())
        if self._lost:
            self._save()
            self._hear(self._saver.wait())

    def _hear(self, outcome: SaveReport | Lost | None) -> None:
        match outcome:
            case SaveReport():
                self._stop.kept = outcome.path
                self._journal.write(outcome)
            case Lost(step=step, reason=reason):
                self._journal.console.warn(
                    f"the checkpoint of step {step} was given up ({reason}): the weights had moved on; "
                    "the next one begins at once"
                )
                self._saved_step, self._lost = None, True


def clip_factor(norm: float, *, limit: float | None) -> float:
    """What gradients of this global norm are multiplied by, as torch.nn.utils.clip_grad_norm_ computes it.

    Not a number for a norm that is none, as there.
    """
    if limit is None:
        return 1.0
    factor = limit / (norm + 1e-6)
    return 1.0 if factor > 1.0 else factor
