"""Class labels from folders, without preparing: against torchvision's `ImageFolder`, and bad folders refused."""

import json

import torch
from torchvision.datasets import ImageFolder

from lit_knn.data import ImageFiles
from lit_knn.data.image_source import Options
from lit_knn.data.prepared import read_prepared
from lit_knn.data.prepared_writer import prepare
from lit_knn.estimators import Exact, class_conditional
from tests.image_files import encoded, labels_json, pixels, refusal, write_folder, write_zip
from tests.toys import enumerate_class_mean

# Sorted by full path, the images of "a" come after those of "a-b".
FILES = {f"{folder}/{i}.png": encoded(pixels(4, 4, 3)) for folder in ("dog", "a", "a-b", "10", "9") for i in range(3)}


def test_labels_are_those_of_torchvision_in_a_folder_and_in_a_zip(tmp_path):
    folder, theirs = write_folder(tmp_path / "s", FILES), []
    for image, label in ImageFolder(folder):
        theirs.append((image.tobytes(), label))
    # A zip may have entries of folders, and dataset.json is not read.
    zipped = {"dog/": b"", "__MACOSX/dog/._0.png": b"", **FILES, **labels_json([[name, 7] for name in FILES])}
    for path in (folder, write_zip(tmp_path / "s.zip", zipped)):
        data = ImageFiles(str(path), labels_from_folders=True)
        images, labels = data.load()
        ours = [(image.transpose(1, 2, 0).tobytes(), label) for image, label in zip(images, labels, strict=True)]
        assert sorted(ours) == sorted(theirs)
        out = tmp_path / f"{path.name}.npy"
        prepare(path, out, Options(labels_from_folders=True))
        prepared = read_prepared(out)
        assert prepared.labels.tolist() == labels.tolist()
        assert prepared.class_names == data.class_names == ImageFolder(folder).classes
    # A file of an older version has no names.
    beside = out.with_suffix(".json")
    fields = json.loads(beside.read_text())
    del fields["class_names"]
    beside.write_text(json.dumps(fields))
    assert read_prepared(out).labels.tolist() == labels.tolist()
    assert ImageFiles(str(folder)).load()[1] is None


def test_class_folders_may_be_links_but_not_to_a_folder_they_are_in(tmp_path):
    elsewhere = write_folder(tmp_path / "elsewhere", FILES)
    linked = tmp_path / "linked"
    linked.mkdir()
    for folder in elsewhere.iterdir():
        (linked / folder.name).symlink_to(folder)
    there, here = (ImageFiles(str(path), labels_from_folders=True).load() for path in (elsewhere, linked))
    assert (here[0] == there[0]).all()
    assert (here[1] == there[1]).all()
    (elsewhere / "dog" / "again").symlink_to(elsewhere)
    assert "dog/again links to a folder that it is in" in refusal(ImageFiles(str(linked)).load)


def test_estimators_average_over_the_folder_of_an_item(tmp_path):
    data = ImageFiles(str(write_folder(tmp_path / "s", FILES)), labels_from_folders=True, batch_size=4)
    data.setup()
    assert data.stored().by_class
    z, labels = torch.randn(5, 3, 4, 4), torch.tensor([4, 0, 2, 2, 1])
    estimator = class_conditional(Exact()).bind(data.reference)
    expected = enumerate_class_mean(data.reference, z, torch.full((5,), 4.0), labels)
    torch.testing.assert_close(estimator.posterior_mean(z, 4.0, labels=labels).double(), expected, atol=1e-5, rtol=1e-5)


def test_folders_that_are_no_classes_are_refused(tmp_path):
    image = encoded(pixels(4, 4, 3))
    cases = {
        "beside": (FILES | {"b.png": image}, "b.png is in none"),
        "deep": (FILES | {"dog/big/7.png": image}, "dog/big/7.png is 2 folders deep"),
        "empty": (FILES | {"notes/readme.txt": b""}, "the folder notes holds no image"),
        "one": ({"cat/0.png": image}, "there is only cat"),
    }
    for name, (files, words) in cases.items():
        folder = write_folder(tmp_path / name, files)
        (folder / ".hidden").mkdir()
        for path in (folder, write_zip(tmp_path / f"{name}.zip", files)):
            told = refusal(prepare, path, tmp_path / "x.npy", Options(labels_from_folders=True))
            assert words in told
            assert refusal(ImageFiles(str(path), labels_from_folders=True).load) == f"data.path={path}: {told}"
    empty = write_folder(tmp_path / "void", FILES)
    (empty / "zebra").mkdir()
    assert "the folder zebra holds no image" in refusal(ImageFiles(str(empty), labels_from_folders=True).load)
