import pytest
import pytorch_lightning as pl
import torch

from lit_knn.callbacks import LastCheckpoint
from lit_knn.data import Digits
from lit_knn.estimators import Network, OneSample
from lit_knn.modules import LitEDM
from lit_knn.nets import ADM, DDPMpp, NCSNpp, UNet
from tests.short_training import TRAINER


def unet(channels=8):
    return UNet(1, channels=channels, multipliers=(1, 2), blocks=1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    model = LitEDM(unet(), OneSample(), lr=1e-2, lr_ramp_up_images=0, ema_half_life_images=500)
    saved = LastCheckpoint(dirpath=str(folder))
    trainer = pl.Trainer(max_steps=20, callbacks=[saved], **TRAINER)
    trainer.fit(model, Digits(batch_size=64))
    return model, folder / "last.ckpt"


def test_trained_network_is_an_estimator_with_the_averaged_weights(trained):
    model, path = trained
    network = Network(path, unet())
    z, sigma = torch.randn(4, 1, 8, 8) * 3, torch.tensor([0.1, 1.0, 5.0, 40.0])
    # After a fit the module itself has the averaged weights.
    with torch.no_grad():
        expected = model.denoiser.eval()(z, sigma)
    torch.testing.assert_close(network.posterior_mean(z, sigma), expected)
    score = (expected - z) / sigma.reshape(-1, 1, 1, 1) ** 2
    torch.testing.assert_close(network.score(z, sigma), score, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", [DDPMpp, NCSNpp, ADM])
def test_checkpoints_of_the_published_families_tell_their_architecture(family, tmp_path):
    net = family(image_size=8, in_channels=1, channels=32, multipliers=[1, 2], blocks=1, attention_at=[4], dropout=0.2)
    saved = LastCheckpoint(dirpath=str(tmp_path))
    trainer = pl.Trainer(max_steps=1, callbacks=[saved], **TRAINER)
    model = LitEDM(net, OneSample())
    trainer.fit(model, Digits(batch_size=8))
    z = torch.randn(2, 1, 8, 8)
    with torch.no_grad():
        expected = model.denoiser.eval()(z, torch.tensor(2.0))
    torch.testing.assert_close(Network(tmp_path / "last.ckpt").posterior_mean(z, 2.0), expected)
