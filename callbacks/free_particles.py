"""Move free particles to the data by the difference of two smoothed scores, without a network."""

import time

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only
from torch import Tensor
from tqdm import tqdm

from lit_knn.callbacks.measurement import Measurement
from lit_knn.common.errors import check_at_least, prefixed
from lit_knn.common.pixels import are_pictures
from lit_knn.common.tables import Row, write_rows
from lit_knn.estimators import Estimator, Exact
from lit_knn.estimators.by_class import copied_apart
from lit_knn.estimators.checks import check_needs_no_source
from lit_knn.figures import particles_figure
from lit_knn.metrics.latents import bind_all, check_not_empty
from lit_knn.metrics.memorisation import check_search
from lit_knn.metrics.particles import ParticleMeasure, Particles
from lit_knn.sampling.noise_grid import NoiseGrid

CSV_NAME, FIGURE_NAME = "particles.csv", "particles"
# The number of particles of each run that the picture shows.
SHOWN = 16


class FreeParticles(Measurement):
    """At validation, move particles from noise to the data by the difference of two smoothed scores.

    A step moves each particle x by a share of V = E_data[x|z, t] − E_particles[x|z, t], at z = x + tη, which is how
    `LitScoreDifference` trains a generator. There is a run for each estimator over the data and each lowest noise
    level. The run's folder gets `particles.csv`, which has a row for each measured step, and the picture
    `particles.png` and `.pdf`. `seconds` is the time of the processor, without the measurements.

    Args:
        estimators: estimators over the data, by name; not those that use the source of z.
        repulsion: estimator over the particles; null for `Exact`.
        t_min: the lowest noise levels.
        t_max: the highest noise level.
        num_particles: number of particles.
        steps: number of steps.
        step_size: share of V that a step moves a particle by.
        every_n_steps: steps from one measurement to the next.
    """

    outputs = (CSV_NAME, f"{FIGURE_NAME}.png")

    @prefixed("FreeParticles")
    def __init__(
        self,
        estimators: dict[str, Estimator],
        repulsion: Estimator | None = None,
        t_min: list[float] = [1.0],  # noqa: B006
        t_max: float = 8.0,
        num_particles: int = 1024,
        steps: int = 400,
        step_size: float = 0.3,
        every_n_steps: int = 50,
    ) -> None:
        check_not_empty(estimators=estimators, t_min=t_min)
        check_at_least(1, steps=steps, every_n_steps=every_n_steps)
        for name, estimator in estimators.items():
            check_needs_no_source(f"estimators.{name}", estimator, "a particle")

        self.estimators = estimators
        # A copy, because the caller may have given an estimator of the data here, too.
        self.repulsion = Exact() if repulsion is None else copied_apart(repulsion)
        self.ends = [NoiseGrid(lowest, t_max) for lowest in t_min]
        self.num_particles = num_particles
        self.steps = steps
        self.step_size = step_size
        self.every_n_steps = every_n_steps

    def check(self) -> None:
        """Bind the estimators to the data, and check that copies can be found."""
        reference = self.reference.to(self.device)
        by_option = {f"estimators.{name}": self.estimators[name] for name in self.estimators}
        bind_all(by_option, reference, min(ends.sigma_min for ends in self.ends))
        check_search(reference)

    def evaluate(self) -> None:
        """Move the particles of all runs, and write the table after each run.

        Every rank moves all of them, and measures its share.
        """
        held_out = getattr(self.data, "held_out_reference", None)
        measure = ParticleMeasure(self.reference, held_out)
        rows: list[Row] = []
        last: dict[str, Tensor] = {}

        total = len(self.estimators) * len(self.ends) * self.steps
        with self.bar(total, "Particles", " steps", leave=True) as bar:
            for name, estimator in self.estimators.items():
                for ends in self.ends:
                    run = f"{name}, t ≥ {ends.sigma_min:g}"
                    rows_of_run, last[run] = self._move(run, estimator, ends, measure, bar)
                    rows += rows_of_run
                    if self.trainer.is_global_zero:
                        write_rows(self.run_folder / CSV_NAME, rows)
        self._draw(rows, last)

    def _move(
        self, run: str, estimator: Estimator, ends: NoiseGrid, measure: ParticleMeasure, bar: tqdm
    ) -> tuple[list[Row], Tensor]:
        """Move the particles of one run; return its rows, and the particles at the end, (num, *shape).

        Args:
            run: name of the run, for the rows.
            estimator: estimator over the data.
            ends: the noise levels.
            measure: measures the particles.
            bar: counts the steps.
        """
        particles = Particles(self.repulsion, ends, self.num_particles, self.step_size, self.seed)
        paths = particles.paths(estimator)
        rows: list[Row] = []
        seconds = 0.0
        for step in range(self.steps + 1):
            begin = time.process_time()
            x = next(paths)
            seconds += time.process_time() - begin
            bar.update(step > 0)

            if step % self.every_n_steps == 0 or step == self.steps:
                row: Row = {"run": run, "step": step, "seconds": round(seconds, 2)}
                row.update(measure(x))
                rows.append(row)
        return rows, x

    @rank_zero_only
    def _draw(self, rows: list[Row], last: dict[str, Tensor]) -> None:
        """Draw the rows, and the first particles of each run, (num, *shape), if they are pictures."""
        images = {}
        if are_pictures(self.reference.shape):
            images = {run: particles[:SHOWN].cpu() for run, particles in last.items()}
        picture = self.save_figure(particles_figure(rows, images), FIGURE_NAME)

        for run in last:
            end = [row for row in rows if row["run"] == run][-1]
            copies = f"{end['copied_fraction']:.1%} copies"
            rank_zero_info(
                f"{run}: fd_pixels {end['fd_pixels']:.3f}, {copies} in {end['seconds']} s"
            )
        rank_zero_info(f"Particles are in {self.run_folder / CSV_NAME} and {picture}")
