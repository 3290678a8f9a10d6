"""The base of the trainings of a one-step generator: the generator, sampling and checkpoints."""

from torch import Tensor, nn

from lit_knn.common.checkpoint_file import MODEL_KEY, Content
from lit_knn.modules.data_scale import warn_of_sigma_data
from lit_knn.modules.generators import OneStepGenerator
from lit_knn.modules.model_checks import check_preconditioning
from lit_knn.modules.radam import RAdamTraining
from lit_knn.reference import ReferenceSet
from lit_knn.sampling import GenerativeModel


class OneStepTraining(RAdamTraining):
    """Trains a one-step generator. Subclasses set `generator` and define the loss."""

    generator: OneStepGenerator

    @property
    def network(self) -> nn.Module:
        """The network inside the generator."""
        return self.generator.network

    def evaluate_network(self, z: Tensor, t: Tensor) -> Tensor:
        """Evaluate the network under its preconditioning."""
        return self.generator.evaluate_network(z, t)

    def check_scale(self, reference: ReferenceSet) -> None:
        """Warn if the data's standard deviation is far from `sigma_data`, if the generator has one."""
        sigma_data = self.generator.preconditioning().get("sigma_data")
        if sigma_data is not None:
            warn_of_sigma_data(reference, sigma_data)

    def generative_model(self) -> GenerativeModel:
        chosen = self.conditioning.chosen_class()
        return self.generator.model(self.known_image_shape(), chosen)

    def check_checkpoint(self, checkpoint: Content) -> None:
        """Check the architecture, and also that the checkpoint has the same preconditioning."""
        super().check_checkpoint(checkpoint)
        saved = dict(checkpoint.get(MODEL_KEY, {}).get("options", {}))
        if saved.get("sampling_sigmas"):
            saved["sigma_max"] = saved["sampling_sigmas"][0]
        check_preconditioning(type(self).__name__, saved, **self.generator.preconditioning())
