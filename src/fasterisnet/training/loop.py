"""The training loop, from top to bottom. Nothing random in it has a state: seeds follow from the seed of the run, the
epoch and the step, so a run that was stopped anywhere goes on exactly as if it had not been.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import torch
from lightning.fabric import Fabric

from fasterisnet.data.preparing import random_stream
from fasterisnet.errors import InputError, NonFiniteError
from fasterisnet.losses import Ranges
from fasterisnet.memory import keep_memory
from fasterisnet.methods import ISNet, calibrate
from fasterisnet.models import build_model
from fasterisnet.training.batches import Epochs
from fasterisnet.training.checks import check_method, check_model
from fasterisnet.training.config import Config
from fasterisnet.training.examining import examine_data
from fasterisnet.training.launching import start_fabric
from fasterisnet.training.measuring import validate, watch
from fasterisnet.training.method import build_method, build_optimizer, preparation_of
from fasterisnet.training.placing import CALIBRATION, TRAINING, WEIGHTS, Place
from fasterisnet.training.report import write_report
from fasterisnet.training.run import Card, Row, Run
from fasterisnet.training.schedule import learning_rate
from fasterisnet.training.splits import Splits
from fasterisnet.training.step import SUMS, LoggedStep, averages
from fasterisnet.training.watching import Board, Watcher

PATIENCE = 10


@dataclass
class Progress:
    """Where a run is."""

    epoch: int = 0
    batch: int = 0
    updates: int = 0
    best_loss: float = math.inf
    best_epoch: int = -1
    skipped: int = 0
    in_a_row: int = 0
    finished: bool = False
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)


class Training:
    """A run: its data, model and method, and the state that is saved and restored."""

    def __init__(self, fabric: Fabric, config: Config, run: Run, watcher: Watcher) -> None:
        self.fabric, self.config, self.run, self.watcher = fabric, config, run, watcher
        self.say = watcher.say
        self.place = Place(fabric, config)
        self.preparation = preparation_of(config)
        self.splits = Splits(self.place, self.preparation, self.say)
        self.source, self.loader = self.splits.source, self.splits.training
        torch.manual_seed(random_stream(config.seed, WEIGHTS))
        model = build_model(
            config.model, len(self.source.classes), channels=config.channels, pretrained=config.pretrained
        )
        check_model(config, model, len(self.source.classes))
        if config.channels_last:
            model = model.to(memory_format=torch.channels_last)
        self.method = build_method(config, self.preparation)
        check_method(config, self.method, model, self.source)
        if isinstance(self.method, ISNet):
            self.method.generator, self.method.share = torch.Generator(), self.place.share
        self.updates = config.epochs * -(-self.loader.batches.count() // config.accumulate)
        self.model = model
        self.step, self.optimizer = fabric.setup(LoggedStep(model, self.method), build_optimizer(config, model))
        self.progress = Progress()
        self.sums = self.earlier = torch.zeros(len(SUMS), dtype=torch.float64)
        self.board = Board(run.folder) if config.tensorboard and fabric.is_global_zero else None
        self.clock: float | None = None

    # --- calibration -----------------------------------------------------------------------------------------------

    def calibrate(self) -> None:
        """C1 and C2: given, found in the run folder, or measured now."""
        if not isinstance(self.method, ISNet):
            return
        config, path = self.config, self.run.path("calibration.json")
        if isinstance(config.ranges, list):
            self.method.ranges = (config.ranges[0], config.ranges[1])
            return
        if isinstance(config.ranges, str) or path.exists():
            self.method.ranges = Ranges.load(config.ranges or path)
        else:
            length = f" of {config.calibration_batches} batches" if config.calibration_batches else ""
            self.say(f"Calibrating C1 and C2: plain epochs{length}: {config.calibration_epochs}, and one to measure.")
            self.place.seed(self.method, CALIBRATION)
            self.method.ranges = calibrate(
                self.method, self.model, Epochs(self.loader, config.calibration_batches or None),
                config.calibration_epochs,
                optimizer=lambda parameters: torch.optim.SGD(parameters, config.calibration_lr, momentum=0.9),
                clip=config.clip or None,
            )  # fmt: skip
            self.loader.waited = 0.0
        self.fabric.barrier()
        if self.fabric.is_global_zero and not path.exists():
            self.method.ranges.save(path)
        self.fabric.barrier()
        for depth, (c1, c2) in self.method.ranges.depths.items():
            self.say(
                f"  {depth}: C1 {min(c1):.3g}, C2 {max(c2):.3g}" + (f" over {len(c1)} maps" if len(c1) > 1 else "")
            )

    # --- state -----------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Everything needed to go on; called at the same places in a run that is stopped and in one that is not."""
        self._count_seconds()
        self.earlier = self.earlier + self.place.added(self.sums)
        self.sums = torch.zeros_like(self.sums)
        if self.fabric.is_global_zero:
            self.run.save_state(
                {
                    "model": self.model.state_dict(),
                    "optimizer": self.optimizer.state_dict(),
                    "precision": self.fabric.strategy.precision.state_dict(),
                    "progress": vars(self.progress),
                    "sums": self.earlier,
                }
            )
        self.fabric.barrier()

    def restore(self) -> None:
        """Back to where the state was saved, if it was."""
        state = self.run.load_state()
        if state is None:
            return
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.fabric.strategy.precision.load_state_dict(state["precision"])
            self.progress = Progress(**state["progress"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise InputError(f"{self.run.path('state.pt')} does not fit this run: {error}") from error
        self.earlier = state["sums"]
        if isinstance(self.method, ISNet):
            self.method.skipped = self.progress.skipped
        self.say(f"Going on in epoch {self.progress.epoch + 1}, batch {self.progress.batch + 1}.")

    # --- epochs ----------------------------------------------------------------------------------------------------

    def fit(self) -> None:
        """All epochs that are left."""
        while not self.progress.finished:
            begin = self.clock = time.perf_counter()
            self.loader.waited = 0.0
            self.method.set_epoch(self.progress.epoch)
            self._train_epoch()
            self._count_seconds()
            self.clock = None
            trained = time.perf_counter() - begin
            self._finish_epoch(trained, self.loader.waited / trained)

    def _count_seconds(self) -> None:
        """Adds what training took since the last call; nothing outside an epoch's training."""
        if self.clock is not None:
            now = time.perf_counter()
            self.progress.seconds += now - self.clock
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
            with self.fabric.no_backward_sync(self.step, enabled=not last):
                loss, sums = self.step(*self.place.moved(images, labels, masks), self.place.shares(masks))
                self.fabric.backward(loss / members)
            self.sums = self.sums + sums.cpu()
            progress.batch += 1
            if last:
                self._update()
                if (
                    config.checkpoint_every
                    and progress.updates % config.checkpoint_every == 0
                    and progress.batch < batches
                ):
                    self.save()
            self.watcher.step(progress.epoch, progress.batch, batches, averages(sums, "train", self.step.module.weight))

    def _update(self) -> None:
        """One step of SGD, left out if a gradient is not finite; many such in a row end the run."""
        progress, config = self.progress, self.config
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(config, progress.updates, self.updates)
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

    def _finish_epoch(self, seconds: float, waiting: float) -> None:
        progress, config = self.progress, self.config
        total = self.earlier + self.place.added(self.sums)
        named = dict(zip(SUMS, total.tolist(), strict=True))
        trained = averages(total, "train", self.step.module.weight)
        row: Row = {
            "epoch": progress.epoch + 1,
            "updates": progress.updates,
            "lr": learning_rate(config, progress.updates - 1, self.updates),
            **trained,
            **validate(self.place, self.step.module, self.splits.validation),
            **watch(self.place, self.model, self.splits.watched),
            "without_mask": int(named["samples"] - named["with_mask"]),
            "skipped": int(named["skipped"]) + progress.skipped,
        }
        if math.isnan(row["val_loss"]):
            raise NonFiniteError(
                f"The loss is not a number after epoch {progress.epoch + 1}; lower lr, which is {config.lr:g}."
            )
        progress.rows.append(row)
        better = row["val_loss"] < progress.best_loss
        if better:
            progress.best_loss, progress.best_epoch = float(row["val_loss"]), progress.epoch
        progress.epoch, progress.batch = progress.epoch + 1, 0
        self.earlier, self.sums = torch.zeros_like(total), torch.zeros_like(total)
        stuck = config.early_stopping > 0 and progress.epoch - progress.best_epoch > config.early_stopping
        progress.finished = progress.epoch >= config.epochs or stuck
        if self.fabric.is_global_zero:
            if better or progress.best_epoch < 0:
                self.run.save_weights(self.model.state_dict(), self.card())
            self.run.write_metrics(progress.rows)
            if self.board is not None:
                self.board.log(progress.epoch, {**row, "waiting": waiting})
        self.save()
        masks = named["with_mask"] / max(named["samples"], 1)
        missing = f", masks {masks:.0%}" if masks < 1 and isinstance(self.method, ISNet) else ""
        self.say(
            f"epoch {progress.epoch}/{config.epochs}  train {row['train_loss']:.4f} (classification "
            f"{row['train_classification']:.4f}, background {row['train_background']:.3f}, foreground "
            f"{row['train_foreground']:.3f})  val {row['val_loss']:.4f}, accuracy {row['val_accuracy']:.3f}"
            f"{missing}{' *' if better else ''}  {seconds:.0f} s, {waiting:.0%} waiting for data"
        )

    def card(self) -> Card:
        """What the weights of this epoch are of."""
        config, last = self.config, self.progress.rows[-1]
        return Card(
            config.model, self.source.classes, self.source.multi_label, self.preparation.to_dict(), config.method,
            config.zb, int(last["epoch"]), float(last["val_loss"]) if math.isfinite(last["val_loss"]) else None,
        )  # fmt: skip


def train(config: Config, *, resume: bool = False, watcher: Watcher | None = None) -> Run:
    """Train as configured, or go on with a run that was stopped, and test the best epoch; returns the run."""
    watcher = watcher or Watcher()
    keep_memory()
    fabric = start_fabric(config)
    run = Run(config.out)
    if not resume:
        run.check_new()
    training = Training(fabric, config, run, watcher if fabric.is_global_zero else Watcher())
    new = fabric.is_global_zero and not resume
    examined = examine_data(config, training.say) if new else None
    fabric.barrier()
    if examined is not None:
        run.create(config)
        run.write_json("data.json", {"samples": examined.splits, "masks": examined.masks})
    training.restore()
    if training.progress.finished:
        training.say(f"{run.folder} has finished its {training.progress.epoch} epochs.")
    else:
        training.calibrate()
        training.fit()
    if fabric.is_global_zero and run.report is None:
        write_report(run, training.splits, training.say, fabric.device)
    return run
