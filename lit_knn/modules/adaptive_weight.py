"""The learnt weight of a loss as a function of the noise level."""

import torch
from torch import Tensor, nn

from lit_knn.nets.embeddings import PositionalEmbedding

# The uncertainty of EDM2 (arXiv 2312.02696, Section 2.1) is a linear function of Fourier features of the noise level;
# the number of features is our choice.
FEATURES = 64


class AdaptiveWeight(nn.Module):
    """w(σ), the logarithm of a loss's weight: the loss exp(w)·L − w has its minimum over w at w = −ln E[L].

    So a trained weight gives all noise levels the same loss (EDM2, Karras et al. 2024; sCM, arXiv 2410.11081, App. D).
    It starts at 0.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = PositionalEmbedding(FEATURES, endpoint=False, sines_first=False)
        self.factors = nn.Parameter(torch.zeros(FEATURES))
        self.offset = nn.Parameter(torch.zeros(()))

    def forward(self, sigma: Tensor) -> Tensor:
        """Map noise levels (B,) to w, (B,) float32, also under autocast."""
        return (self.embedding(sigma.log()) * self.factors).sum(1) + self.offset
