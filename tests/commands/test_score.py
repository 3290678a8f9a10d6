"""The command `score`: its table, its pictures, what is the reference, and its refusals."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lit_knn.commands.score_files import KEY, keep_rows
from lit_knn.common.tables import read_rows
from lit_knn.data import Digits
from lit_knn.data.prepared_writer import prepare
from lit_knn.metrics import ScoreOptions, score
from main import main
from tests.command_lines import refusal_of
from tests.image_files import encoded, write_folder

OF_PIXELS = ["--metrics", "fd_pixels,pr,memorisation", "--cache_dir", "null", "--splits", "2"]
DATA = ["--data", "Images", "--data.path", "real.npy"]


@pytest.fixture
def digits(own_folder):
    """Folders and files of 8x8 digits in the current folder; returns all images, (N, 1, 8, 8)."""
    images = Digits().load()[0]
    images = images[np.random.default_rng(0).permutation(len(images))]
    write_folder(Path("folder"), {f"{i}.png": encoded(images[i, 0]) for i in range(60)})
    np.savez("adm.npz", arr_0=images[60:140].transpose(0, 2, 3, 1))
    np.save("real.npy", images[200:500])
    flat = (images[500:900] / 127.5 - 1).reshape(400, -1)
    np.save("wide.npy", np.zeros((30, 1, 8, 9), np.uint8))
    Path("taken.csv").write_text("a,b\n1,2\n")
    Path("folder.csv").mkdir()
    np.savez("stats.npz", mu=flat.mean(0), sigma=np.cov(flat.T))
    return images


@pytest.mark.usefixtures("digits")
@pytest.mark.filterwarnings("ignore:.*rank-deficient")
def test_rows_and_pictures_of_all_samples_are_written(capsys):
    main(["score", "folder", "adm.npz", "stats.npz", *DATA, "--data.held_out", "40", *OF_PIXELS])
    rows = read_rows(Path("scores/scores.csv"))
    of_folder = [row for row in rows if row["samples"] == "folder"]
    assert [row["metric"] for row in of_folder] == [
        *("fd_pixels", "fd_pixels", "precision", "recall", "auth_pct", "c_t"),
        *("copied_fraction", "mean_nearest_distance"),
    ]
    assert [row["reference"] for row in of_folder[:3]] == ["real.npy", "stats.npz", "real.npy"]
    assert {row["reference_images"] for row in rows} == {"260", ""}
    assert [row["metric"] for row in rows if not row["standard_error"]] == ["c_t", "c_t"]
    shown = capsys.readouterr().out
    assert shown.count("fd_pixels") == 4
    assert "Table: scores/scores.csv" in shown

    # Rows of samples above rows of images: 32 pairs, 8 in a row, enlarged to 32 pixels
    with Image.open("scores/scores_folder_nearest.png") as picture:
        assert picture.size == (8 * 34 + 2, 8 * 34 + 4 * 2)


@pytest.mark.filterwarnings("ignore:.*rank-deficient")
def test_scores_are_shown_if_later_samples_fail(digits, capsys):
    files = {f"{i}.png": encoded(digits[i, 0]) for i in range(60)}
    # The header of the last picture is whole, so only reading its pixels fails.
    files["9.png"] = files["9.png"][:-40]
    write_folder(Path("cut"), files)
    with pytest.raises(SystemExit):
        main(["score", "folder", "cut", *DATA, *OF_PIXELS])
    shown = capsys.readouterr()
    assert "fd_pixels" in shown.out
    assert "9.png" in shown.err
    assert {row["samples"] for row in read_rows(Path("scores/scores.csv"))} == {"folder"}


@pytest.mark.usefixtures("digits")
@pytest.mark.filterwarnings("ignore:.*rank-deficient")
@pytest.mark.filterwarnings("ignore:c_t")
def test_a_table_keeps_rows_of_other_samples_and_replaces_its_own():
    prepare("folder", "prepared.npy")
    output = ["--output", "tables/mine.csv"]
    main(["score", "folder", *DATA, *OF_PIXELS, *output])
    main(["score", "prepared.npy", *DATA, *OF_PIXELS, *output])
    first = read_rows(Path("tables/mine.csv"))
    main(["score", "folder", *DATA, *OF_PIXELS, *output])
    again = read_rows(Path("tables/mine.csv"))

    def values(rows, samples):
        return [(row["metric"], row["value"]) for row in rows if row["samples"] == samples]

    assert len(first) == len(again) == 2 * len(values(first, "folder"))
    assert values(first, "folder") == values(again, "folder") == values(first, "prepared.npy")
    assert Path("tables/mine_folder_nearest.png").exists()
    options = ScoreOptions(features="pixels", splits=0)
    rows = score("folder", "real.npy", "fd_pixels", options=options)
    assert float(values(first, "folder")[0][1]) == pytest.approx(rows[0]["value"], rel=1e-6)


@pytest.mark.usefixtures("digits")
@pytest.mark.filterwarnings("ignore:c_t")
def test_rows_of_other_options_stay_side_by_side(capsys):
    of_copies = ["score", "folder", *DATA, "--metrics", "memorisation"]
    main(of_copies)
    assert "options" not in capsys.readouterr().out
    main([*of_copies, "--copy_threshold", "0.99"])
    assert "copy_threshold=0.99" in capsys.readouterr().out

    rows = [
        row for row in read_rows(Path("scores/scores.csv")) if row["metric"] == "copied_fraction"
    ]
    assert [row["options"] for row in rows] == ["", "copy_threshold=0.99"]
    # The share of copies grows with the threshold.
    assert float(rows[0]["value"]) < float(rows[1]["value"])


@pytest.mark.filterwarnings("ignore:waiting for another process")
def test_two_processes_add_rows_to_one_table(tmp_path):
    path = tmp_path / "scores.csv"

    def add(number):
        keep_rows(path, [dict.fromkeys(KEY, f"x{number}") | {"value": 1.0}])

    # Locks of files are apart in threads, too.
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, range(40)))
    assert len(read_rows(path)) == 40


@pytest.mark.usefixtures("digits")
@pytest.mark.filterwarnings("ignore:.*rank-deficient")
def test_statistics_alone_are_a_reference():
    main(["score", "stats.npz", "adm.npz", "--metrics", "fd_pixels", "--output", "."])
    (row,) = read_rows(Path("scores.csv"))
    assert (row["samples"], row["reference"], row["images"]) == ("adm.npz", "stats.npz", "80")


@pytest.mark.usefixtures("digits")
@pytest.mark.filterwarnings("ignore:.*rank-deficient")
@pytest.mark.filterwarnings("ignore:c_t")
def test_a_slash_names_no_other_samples_and_a_binary_table_is_kept():
    Path("binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.warns(UserWarning, match=r"binary\.csv is damaged"):
        main(["score", "folder", *DATA, *OF_PIXELS, "--output", "binary.csv"])
    assert Path("binary.csv.damaged-1").read_bytes() == b"\xff\xfe\x00"
    first = read_rows(Path("binary.csv"))
    main(["score", "folder/", *DATA, *OF_PIXELS, "--output", "binary.csv"])
    assert read_rows(Path("binary.csv")) == first


@pytest.mark.usefixtures("digits")
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("folder", "there is nothing to compare with"),
        ("stats.npz --data Digits", "samples: there are only statistics"),
        ("folder stats.npz --metrics kid", "kid: compare with single images, but the reference is"),
        ("gone.zip --data Digits", "gone.zip does not exist"),
        ("folder --data Digitss", "did you mean Digits"),
        ("folder --data Digits --metrcs fid", "did you mean --metrics?"),
        ("folder --data Digits --metrics kid --features pixels", "a smaller kid_subset_size needs"),
        ("adm.npz wide.npy stats.npz --metrics fd_pixels", "score them one after the other"),
        ("wide.npy --data Digits --output taken.csv", "no table of scores: its columns are a, b"),
        ("wide.npy --data Digits --output folder.csv", "folder.csv is a folder, and no table"),
        ("folder --data Digits --pr_k 0", "pr_k must be at least 1, got 0"),
        (
            "folder --data Digits --features vgg",
            "features: there are no 'vgg'; there are inception",
        ),
        ("folder --data CIFAR10 --data.download false", "has no intact cifar-10-batches-py"),
    ],
)
def test_bad_command_lines_end_in_a_line(line, message, capsys):
    assert message in refusal_of(["score", *line.split()], capsys)
