"""The training loop, from top to bottom. Nothing random in it has a state: seeds follow from the seed of the run, the
epoch and the step, so a run that was stopped anywhere goes on exactly as if it had not been.
"""

from __future__ import annotations

import math
import time
from functools import partial
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor

from fasterisnet.data.loader import LoadingError
from fasterisnet.data.pictures import readable
from fasterisnet.data.preparation import random_stream
from fasterisnet.errors import InputError, NonFiniteError, UsageError
from fasterisnet.memory import keep_memory
from fasterisnet.methods import Guided, ISNet
from fasterisnet.methods.ranges import Ranges
from fasterisnet.models import build_model, check_trust
from fasterisnet.runs import fingerprint
from fasterisnet.runs.card import Card
from fasterisnet.runs.config import Config
from fasterisnet.runs.folder import Row, Run
from fasterisnet.runs.inputs import preparation_of
from fasterisnet.runs.lock import Claim
from fasterisnet.runs.report import write_report
from fasterisnet.training.calibration import digest_of, set_ranges
from fasterisnet.training.console import Board, Watcher, epoch_line
from fasterisnet.training.data import Splits, examine_data
from fasterisnet.training.distributed import TRAINING, WEIGHTS, Place, all_in_one_boat, start_fabric
from fasterisnet.training.header import header
from fasterisnet.training.resume import restore
from fasterisnet.training.setup import (
    build_method,
    build_optimizer,
    check_method,
    check_model,
    check_options,
    learning_rate,
    weights_of,
)
from fasterisnet.training.state import Moment, Progress, stage_of
from fasterisnet.training.statistics import measure_statistics
from fasterisnet.training.step import LoggedStep, averages, validate, watch
from fasterisnet.training.stopping import Signals, Stopped

PATIENCE = 10
WAITING = 0.3  # share of the time spent waiting for data that is worth a line
MINUTE = 60.0  # of training that a stop during the validation may cost


class Training:
    """A run: its data, model and method, and the state that is saved and restored."""

    def __init__(
        self,
        fabric: Fabric,
        config: Config,
        run: Run,
        watcher: Watcher,
        state: dict[str, Any] | None,
        trust: bool,
        signals: Signals,
    ) -> None:
        self.fabric, self.config, self.run, self.watcher, self.signals = fabric, config, run, watcher, signals
        self.say = watcher.say
        self.place = Place(fabric, config)
        self.preparation = preparation_of(config)
        self.splits = Splits(self.place, self.preparation, self.say)
        self.source, self.loader = self.splits.source, self.splits.training
        torch.manual_seed(random_stream(config.seed, WEIGHTS))
        model = build_model(
            config.model, len(self.source.classes), channels=config.channels, size=config.size, trust=trust,
            pretrained=config.pretrained if state is None else False,
        )  # fmt: skip
        self.method = build_method(config)
        self.shape = {name: getattr(self.method, name) for name in self.method.shaping}
        model = self.method.network(model, config.channels, config.size, **self.shape)
        check_model(config, model, len(self.source.classes))
        if config.channels_last:
            model = model.to(memory_format=torch.channels_last)
        for line in check_method(config, self.method, model, self.source):
            self.say(line)
        self.method.generator, self.method.share = torch.Generator(), self.place.share
        self.state = state
        self.data = self._fingerprint()
        self.updates = -(-self.loader.batches.count() // config.accumulate)
        self.stages = [0, *self.method.plan(config.epochs), config.epochs]
        self.model = model
        weights = weights_of(config, self.source, self.splits.samples["train"])
        if weights is not None:
            shown = (f"{readable(c)} {w:.3g}" for c, w in zip(self.source.classes, weights.tolist(), strict=True))
            self.say(f"Weights of the classes in the classification loss: {', '.join(shown)}")
        self.logged = LoggedStep(model, self.method, weights)
        self.step, self.optimizer = fabric.setup(self.logged, build_optimizer(config, model))
        self.progress = Progress()
        self.sums = torch.zeros(len(self.logged.sums), dtype=torch.float64)
        self.board = Board(run.folder) if config.tensorboard and fabric.is_global_zero else None
        self.clock: Moment | None = None
        self.saved = time.monotonic()
        for name, loader in {config.validation: self.splits.validation, **self.splits.watched}.items():
            loader.heard = partial(watcher.work, name)

    # --- state -----------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Everything needed to go on; between any two updates, and a run is the same wherever it was done."""
        self._count_seconds()
        self._write_state(self.place.gathered(self.sums))
        self.fabric.barrier()
        self.saved = time.monotonic()

    def _write_state(self, sums: Tensor) -> None:
        """sums: one row for each process."""
        if not self.fabric.is_global_zero:
            return
        ranges = self.method.ranges if isinstance(self.method, ISNet) else None
        self.run.save_state(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "precision": self.fabric.strategy.precision.state_dict(),
                "progress": vars(self.progress),
                "sums": sums,
                "options": fingerprint.options_of(self.config),
                "data": self.data,
                "calibration": digest_of(ranges) if isinstance(ranges, Ranges) else None,
            }
        )

    def _fingerprint(self) -> dict[str, Any]:
        """The process that writes the state looks at the data."""
        if not self.fabric.is_global_zero:
            return {}
        return fingerprint.data_of(self.source, self.config.data, max(self.config.workers, 1))

    # --- epochs ----------------------------------------------------------------------------------------------------

    def fit(self) -> None:
        """All epochs that are left."""
        while not self.progress.finished:
            begin = self.clock = Moment()
            self.loader.waited = 0.0
            self.method.set_epoch(self.progress.epoch)
            self.method.epoch_begins(self.model)
            try:
                with self.signals.waiting():
                    self._train_epoch()
                    self._count_seconds()
                    self._keep(MINUTE)
                self.clock = None
                trained = time.perf_counter() - begin.wall
                self._finish_epoch(trained, self.loader.waited / trained)
            except LoadingError:
                self._save_at_once()
                raise

    def _keep(self, seconds: float) -> None:
        """Between two updates: saves what is older than so many seconds, and ends here if a signal says so."""
        progress, every = self.progress, self.config.checkpoint_every
        counted = every and progress.updates % every == 0 and progress.batch < self.loader.batches.count()
        due = seconds and time.monotonic() - self.saved >= seconds
        received, due = self.place.largest(self.signals.received, int(due))
        if received or due or counted:
            self.save()
        if received:
            raise Stopped(received, f" in epoch {progress.epoch + 1} after batch {progress.batch}; the state is saved")

    def _save_at_once(self) -> None:
        """Between two updates, where only this process knows of it: what several have added up is in all of them."""
        whole = self.progress.batch % self.config.accumulate == 0 or self.progress.batch == self.loader.batches.count()
        if self.place.share[1] == 1 and whole:
            self._count_seconds()
            self._write_state(self.sums.view(1, -1))

    def _count_seconds(self) -> None:
        """Adds what training took since the last call; nothing outside an epoch's training."""
        if self.clock is not None:
            now = Moment()
            self.progress.seconds += now.wall - self.clock.wall
            self.progress.processor_seconds += now.processor - self.clock.processor
            self.clock = now

    def _train_epoch(self) -> None:
        progress, config = self.progress, self.config
        batches = self.loader.batches.count()
        self.model.train()
        for images, labels, masks in self.loader.epoch(progress.epoch, progress.batch):
            group = progress.batch // config.accumulate * config.accumulate
            members = min(config.accumulate, batches - group)
            last = progress.batch == group + members - 1
            self.place.seed(self.method, TRAINING, progress.epoch, progress.batch)
            self.place.draws(self.method, *self.loader.batches.shared(progress.batch))
            with self.fabric.no_backward_sync(self.step, enabled=not last):
                loss, sums = self.step(*self.place.moved(images, labels, masks), self.place.shares(masks))
                self.fabric.backward(loss / members)
            self.sums = self.sums + sums.cpu()
            progress.batch += 1
            if last:
                self._update()
                self._keep(60 * config.checkpoint_minutes)
            self.watcher.step(progress.epoch, progress.batch, batches, averages(sums, "train", self.logged))
        self.watcher.work(config.validation, 0, self.splits.validation.batches.count())

    def _update(self) -> None:
        """One step of SGD, left out if a gradient is not finite; many such in a row end the run."""
        progress, config = self.progress, self.config
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate(progress.updates)
        norm = self.fabric.clip_gradients(
            self.step, self.optimizer, max_norm=config.clip or math.inf, error_if_nonfinite=False
        )
        progress.updates += 1
        if norm is None or bool(torch.isfinite(norm)):
            self.optimizer.step()
            progress.in_a_row = 0
        else:
            self.optimizer.step() if config.precision == "16-mixed" else None
            progress.skipped += 1
            progress.in_a_row += 1
            if progress.in_a_row >= PATIENCE:
                raise NonFiniteError(
                    f"The gradient was not finite in {PATIENCE} updates in a row; lower the learning rate (lr is "
                    f"{config.lr:g}), or calibrate C1 and C2 again."
                )
        self.optimizer.zero_grad()

    def _rate(self, done: int) -> float:
        """The rate of an update; a stage of the method, or epochs that were added to a run, begin the schedule anew."""
        first, after = stage_of(self.stages, self.progress.epoch)
        epoch, updates = max((first, first * self.updates), self.progress.stretch)
        return learning_rate(self.config, done - updates, (after - epoch) * self.updates)

    def _finish_epoch(self, seconds: float, waiting: float) -> None:
        progress, config = self.progress, self.config
        total = self.place.added(self.sums)
        named = dict(zip(self.logged.sums, total.tolist(), strict=True))
        trained = averages(total, "train", self.logged)
        first, ends = stage_of(self.stages, progress.epoch)
        measure_statistics(self.place, self.method, self.model, self.loader, progress.epoch)
        row: Row = {
            "epoch": progress.epoch + 1,
            "updates": progress.updates,
            "lr": self._rate(progress.updates - 1),
            **trained,
            **validate(self.place, self.logged, self.splits.validation, ends - 1),
            **watch(self.place, self.model, self.splits.watched),
            "without_mask": int(named["samples"] - named["with_mask"]),
            "skipped": int(named["skipped"]) + progress.skipped,
        }
        if math.isnan(row["val_loss"]):
            raise NonFiniteError(
                f"The loss is not a number after epoch {progress.epoch + 1}; lower lr, which is {config.lr:g}."
            )
        remark, score = self.method.epoch_ends(self.model, row), float(self.method.score(row))
        progress.rows.append(row)
        better = progress.is_better(score, config, (first, ends))
        save = better or math.isinf(progress.best_loss)
        if better:
            progress.best_loss, progress.best_epoch = score, progress.epoch
        progress.epoch, progress.batch = progress.epoch + 1, 0
        self.sums = torch.zeros_like(total)
        since = max(progress.best_epoch + 1, progress.stretch[0])
        stuck = config.early_stopping > 0 and progress.epoch - since >= config.early_stopping
        progress.finished = progress.epoch >= config.epochs or (stuck and ends == config.epochs)
        weights = "best" if ends == config.epochs else f"best-until-{ends}"
        if self.fabric.is_global_zero:
            if save:
                self.run.save_weights(self.model.state_dict(), self.card(), weights)
            self.run.write_metrics(progress.rows)
            if self.board is not None:
                self.board.log(progress.epoch, {**row, "waiting": waiting})
        if progress.epoch == ends < config.epochs:
            self._next_stage(weights)
        self.save()
        masks = named["with_mask"] / max(named["samples"], 1)
        masks = masks if self.method.needs_masks else 1.0
        line = epoch_line(row, config.epochs, isinstance(self.method, Guided), better, masks) + f"  {seconds:.0f} s"
        self.say(f"{line}{'  ' if remark else ''}{remark}")
        if waiting > WAITING and seconds > 1:
            self.say(f"  {waiting:.0%} of the time training waited for data; more --workers may help")

    def _next_stage(self, weights: str) -> None:
        """The network goes back to the best epoch of the stage that is over, and a new search for the best begins."""
        self.fabric.barrier()
        self.model.load_state_dict(self.run.load_weights(weights)[0])
        self.progress.best_loss, self.progress.best_epoch = math.inf, self.progress.epoch - 1

    def card(self) -> Card:
        """What the weights of this epoch are of."""
        config, last = self.config, self.progress.rows[-1]
        return Card(
            config.model, self.source.classes, self.source.multi_label, self.preparation.to_dict(), config.method,
            config.zb, int(last["epoch"]), float(last["val_loss"]) if math.isfinite(last["val_loss"]) else None,
            self.shape,
        )  # fmt: skip


def train(
    config: Config,
    *,
    resume: bool = False,
    watcher: Watcher | None = None,
    trust: bool = False,
    data_changed_ok: bool = False,
    report: bool = True,
) -> Run:
    """Train as configured, or go on with a run that was stopped, and test the best epoch; returns the run.

    trust: the user's word that code the model is named as may be imported. data_changed_ok: go on with other data.
    report: without it no test is made.
    """
    check_trust(config.model, trust)
    if not resume:
        check_options(config)
    watcher = watcher or Watcher()
    keep_memory()
    fabric = start_fabric(config)
    with all_in_one_boat(fabric, config), Signals(fabric.is_global_zero) as signals:
        run = Run(config.out)
        claim = Claim(run.folder)
        try:
            problem = fabric.broadcast(claim.take(new=not resume) if fabric.is_global_zero else None)
            if problem is not None:
                raise UsageError(problem)
            state = run.load_state() if resume else None
            results = [name for name in ("metrics.csv", "best.safetensors", "report.json") if run.path(name).exists()]
            if resume and state is None and results:
                raise InputError(
                    f"{run.path('state.pt')} is gone: {results[0]} is of epochs that cannot be gone on from. Put it "
                    "back, or train into another --out."
                )
            heard = watcher if fabric.is_global_zero else Watcher()
            training = Training(fabric, config, run, heard, state, trust, signals)
            restore(training, data_changed_ok)
            examined = examine_data(config, training.say) if fabric.is_global_zero and not resume else None
            fabric.barrier()
            if examined is not None:
                run.create(config)
                run.write_json("data.json", {"samples": examined.splits, "masks": examined.masks})
            _finish(training, run, trust, report)
        finally:
            claim.release()
    return run


def _finish(training: Training, run: Run, trust: bool, report: bool) -> None:
    """From wherever a run is to its end, and to its report."""
    fabric = training.fabric
    if fabric.is_global_zero:
        training.watcher.begin(training.config.epochs, isinstance(training.method, Guided))
        for line in header(training.config, training.model, training.method, training.splits, fabric):
            training.say(line)
    if training.progress.finished:
        training.say(f"{run.folder} has finished its {training.progress.epoch} epochs.")
    else:
        set_ranges(training)
        if training.state is None:
            training.save()
        training.fit()
    if report and fabric.is_global_zero and run.report is None:
        splits = training.splits
        run.write_metrics(training.progress.rows)  # the state has it, whatever has become of the file
        write_report(
            run, splits.source, splits.training_samples, splits.bad, training.say, fabric.device, trust=trust,
            extended=[epoch for epoch, _ in training.progress.stretches], heard=training.watcher.work,
        )  # fmt: skip
