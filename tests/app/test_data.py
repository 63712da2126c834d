"""The datasets: against the real files where they are at hand, and small files of the same formats."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import threading
import tracemalloc
import zipfile
from dataclasses import asdict, replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import torch

from sylvester import names
from sylvester.app.data import DataError, DownloadError, check, fetch, files, listing, load
from sylvester.app.data.catalogue import CATALOGUE, Entry, File, Variant

REAL = Path(os.environ.get("SYLVESTER_DATA") or Path(__file__).parents[3] / "shared" / "data")
needs_real_files = pytest.mark.skipif(not REAL.is_dir(), reason="the published files are not here")
SPLITS = ("train", "valid", "test")


@pytest.fixture(autouse=True)
def _isolated(tmp_path, monkeypatch):
    """No test sees the user's data folder or cache."""
    monkeypatch.delenv("SYLVESTER_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))


def mat(**matrices: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    scipy.io.savemat(buffer, matrices, do_compression=True)
    return buffer.getvalue()


def amat(rows: np.ndarray) -> bytes:
    return "".join(" ".join(map(str, row)) + "\n" for row in rows).encode()


def small(name: str, folder: Path, contents: list[bytes], url: str | None = None, **changes) -> Entry:
    """The catalogue's entry, changed to expect these contents, which are written to the folder."""
    folder.mkdir(exist_ok=True)
    described = []
    for file, data in zip(CATALOGUE[name].variants[0].files, contents, strict=True):
        (folder / file.name).write_bytes(data)
        checksum = f"sha256:{hashlib.sha256(data).hexdigest()}"
        described.append(File(file.name, checksum, url and f"{url}/{file.name}"))
    return replace(CATALOGUE[name], variants=(Variant(tuple(described)),), **changes)


def small_mnist(folder: Path, **options) -> tuple[Entry, np.ndarray]:
    rows = np.random.default_rng(0).integers(0, 2, (3, 5, 8))  # (split, image, pixel)
    contents = [amat(split) for split in rows]
    return small("mnist", folder, contents, image=(1, 4, 2), splits=(5, 5, 5), **options), rows


def test_catalogue_and_command_line_agree_on_names():
    assert tuple(CATALOGUE) == names.DATASETS


class TestDigits:
    def test_are_the_same_bits_everywhere_and_for_every_seed(self):
        first, second = load("digits"), load("digits", seed=7)
        assert first.counts == {"train": 1197, "valid": 300, "test": 300}
        assert first.source == "embedded"
        bits = hashlib.sha256(first.train.numpy().tobytes() + first.test.numpy().tobytes()).hexdigest()
        assert bits == "97949b7ab8a147c697f433c4a7931ef88acd040b31c3f15cf796343c9bbca0ab"
        assert all(torch.equal(getattr(first, split), getattr(second, split)) for split in SPLITS)

    def test_binarization_has_the_grey_levels_as_its_mean(self):
        dataset = load("digits")
        x = torch.cat([dataset.train, dataset.valid, dataset.test]).flatten(1).double()
        grey = torch.from_numpy(np.load(CATALOGUE["digits"].variants[0].folder / "digits.npz")["images"]) / 16
        grey = grey.flatten(1).double()
        assert set(x.unique().tolist()) == {0.0, 1.0}
        error = (grey * (1 - grey)).sum(0).sqrt() / len(grey)  # of each pixel's mean, given the grey levels
        assert ((x.mean(0) - grey.mean(0)).abs() <= 4 * error).all()


@needs_real_files
class TestRealFiles:
    @pytest.mark.parametrize("name", names.DATASETS)
    def test_have_the_published_splits_and_checksums(self, name):
        entry, dataset = CATALOGUE[name], load(name, data_dir=REAL)
        assert tuple(dataset.counts.values()) == entry.splits
        known = {file.name: file.checksum for variant in entry.variants for file in variant.files}
        assert dataset.sha256
        assert all(known[file] == f"sha256:{digest}" for file, digest in dataset.sha256.items())
        for split in SPLITS:
            x = getattr(dataset, split)
            assert x.dtype == torch.float32
            assert x.shape[1:] == entry.image
            assert x.is_contiguous()
            if name == "freyfaces":
                assert torch.equal((255 * x).round() / 255, x)
            elif name != "omniglot" or split != "train":
                assert ((x == 0) | (x == 1)).all()

    def test_mnist_is_read_as_a_text_parser_reads_it(self):
        with gzip.open(REAL / "binarized_mnist_valid.amat.gz") as text:
            expected = np.loadtxt(text, max_rows=50).reshape(50, 1, 28, 28)
        np.testing.assert_array_equal(load("mnist", data_dir=REAL).valid[:50], expected)

    def test_caltech_objects_are_ones_and_upright(self):
        columns = scipy.io.loadmat(REAL / "caltech101_silhouettes_28_split1.mat")["test_data"]
        x = load("caltech101", data_dir=REAL).test.numpy()[:, 0]
        row, column = 3, 20
        np.testing.assert_array_equal(x[:, row, column], 1 - columns[:, 28 * column + row])
        assert x[:, 0].mean() < x[:, 14].mean()  # objects are in the middle

    def test_frey_faces_are_shuffled_as_the_paper_shuffled_them(self):
        faces = scipy.io.loadmat(REAL / "frey_rawface.mat")["ff"].T.copy()
        order = np.random.RandomState(123)
        order.shuffle(faces)
        dataset = load("freyfaces", data_dir=REAL, seed=123)
        x = torch.cat([dataset.train, dataset.valid, dataset.test]).flatten(1)
        np.testing.assert_array_equal((255 * x).round(), faces)
        assert not torch.equal(load("freyfaces", data_dir=REAL, seed=321).test, dataset.test)

    def test_omniglot_is_grey_in_training_and_binarized_once_elsewhere(self):
        dataset = load("omniglot", data_dir=REAL, seed=5)
        assert dataset.dynamic
        assert dataset.source == "reconstruction"
        grey = scipy.io.loadmat(REAL / "omniglot_reconstructed.mat")["testdata"].T
        grey = grey.reshape(-1, 28, 28).swapaxes(1, 2) / 255
        x = dataset.test.numpy()[:, 0]
        assert (x[grey == 0] == 0).all()
        assert (x[grey == 1] == 1).all()
        between = (grey > 0) & (grey < 1)
        error = np.sqrt((grey * (1 - grey)).sum()) / between.sum()
        assert abs(x[between].mean() - grey[between].mean()) < 4 * error
        assert torch.equal(load("omniglot", data_dir=REAL, seed=5).test, dataset.test)

    def test_omniglot_validation_is_drawn_from_all_characters(self):
        """The reconstruction is sorted by character; a tail would hold a few dozen characters only."""
        means = load("omniglot", data_dir=REAL).train.flatten(1).mean(1)
        first, second = means[:11_500], means[11_500:]
        assert (first.mean() - second.mean()).abs() < 4 * means.std() * (2 / 11_500) ** 0.5

    def test_loading_leaves_global_randomness_alone(self):
        before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
        for name in ("digits", "omniglot", "freyfaces"):
            load(name, data_dir=REAL)
        assert torch.equal(torch.get_rng_state(), before[0])
        np.testing.assert_array_equal(np.random.get_state()[1], before[1])  # noqa: NPY002

    def test_check_reports_files_and_counts(self, monkeypatch):
        monkeypatch.setenv("SYLVESTER_DATA", str(REAL))
        report = check("caltech101")
        assert report.ok
        assert report.counts == {"train": 4100, "valid": 2264, "test": 2307}
        assert report.files[0].expected == report.files[0].got
        assert {entry.name: entry.present for entry in listing()} == dict.fromkeys(names.DATASETS, True)


class TestFormats:
    """Small images that are neither square nor symmetric, so that no transposition goes unnoticed."""

    def test_amat(self, tmp_path):
        entry, rows = small_mnist(tmp_path / "data")
        dataset = load(entry, data_dir=tmp_path / "data")
        for split, expected in zip(SPLITS, rows, strict=True):
            np.testing.assert_array_equal(getattr(dataset, split), expected.reshape(5, 1, 4, 2))

    def test_gzipped_files_are_their_plain_content(self, tmp_path):
        entry, _ = small_mnist(tmp_path / "data")
        plain = load(entry, data_dir=tmp_path / "data")
        for path in list((tmp_path / "data").iterdir()):
            path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
        gzipped = load(entry, data_dir=tmp_path / "data")
        assert torch.equal(plain.valid, gzipped.valid)
        assert plain.sha256 == gzipped.sha256

    def test_caltech_is_column_major_and_inverted(self, tmp_path):
        image = np.array([[1, 0], [1, 0], [1, 0], [1, 1]])  # an upright L
        rows = (1 - image).T.reshape(1, 8).astype(np.uint8)
        content = mat(train_data=rows, val_data=rows, test_data=rows)
        entry = small("caltech101", tmp_path / "data", [content], image=(1, 4, 2), splits=(1, 1, 1))
        np.testing.assert_array_equal(load(entry, data_dir=tmp_path / "data").test[0, 0], image)

    @pytest.mark.parametrize("scale", [1.0, 255])
    def test_omniglot_is_column_major_in_floats_or_bytes(self, tmp_path, scale):
        image = np.array([[1, 0], [1, 0], [1, 0], [1, 1]])
        column = (image.T.reshape(8, 1) * scale).astype(np.uint8 if scale == 255 else np.float64)
        content = mat(data=np.tile(column, 5), testdata=column)
        entry = small("omniglot", tmp_path / "data", [content], image=(1, 4, 2), splits=(3, 2, 1))
        dataset = load(entry, data_dir=tmp_path / "data")
        for split, count in zip(SPLITS, (3, 2, 1), strict=True):
            np.testing.assert_array_equal(getattr(dataset, split)[:, 0], np.tile(image, (count, 1, 1)))

    def test_the_real_omniglot_file_is_preferred_and_recorded(self, tmp_path):
        column = np.ones((8, 1))
        content = mat(data=np.tile(column, 5), testdata=column)
        entry = small("omniglot", tmp_path / "data", [content], image=(1, 4, 2), splits=(3, 2, 1))
        file = entry.variants[0].files[0]
        copy = Variant((replace(file, name="copy.mat"),), source="reconstruction")
        entry = replace(entry, variants=(*entry.variants, copy))
        (tmp_path / "data" / "copy.mat").write_bytes(content)
        assert load(entry, data_dir=tmp_path / "data").source == "files"
        (tmp_path / "data" / file.name).unlink()
        assert load(entry, data_dir=tmp_path / "data").source == "reconstruction"

    def test_checksums_other_than_sha256_are_checked_too(self, tmp_path):
        content = mat(ff=np.arange(24, dtype=np.uint8).reshape(8, 3))
        entry = small("freyfaces", tmp_path / "data", [content], image=(1, 4, 2), splits=(1, 1, 1))
        file = entry.variants[0].files[0]
        md5 = replace(file, checksum=f"md5:{hashlib.md5(content).hexdigest()}")
        assert load(replace(entry, variants=(Variant((md5,)),)), data_dir=tmp_path / "data").sha256
        wrong = replace(file, checksum=f"md5:{'0' * 32}")
        with pytest.raises(DataError, match=r"Expected .* checksum md5:0{32}; got md5:"):
            load(replace(entry, variants=(Variant((wrong,)),)), data_dir=tmp_path / "data")


class TestBadFiles:
    def test_missing_file(self, tmp_path):
        with pytest.raises(DataError, match=r"Expected chardata\.mat.*got neither: download it from https"):
            load("omniglot", data_dir=tmp_path)

    @pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:-1] + b"0", lambda data: b""])
    def test_wrong_checksum(self, tmp_path, damage):
        entry, _ = small_mnist(tmp_path / "data")
        path = tmp_path / "data" / "binarized_mnist_valid.amat"
        path.write_bytes(damage(path.read_bytes()))
        with pytest.raises(DataError, match=r"binarized_mnist_valid\.amat to have the checksum sha256:.*; got"):
            load(entry, data_dir=tmp_path / "data")
        report = check(entry, data_dir=tmp_path / "data")
        assert [file.ok for file in report.files] == [True, False, True]
        assert not report.ok
        assert "truncated or altered" in report.problem

    @pytest.mark.parametrize("kept", [0.0, 0.1, 0.5, 0.99])
    def test_truncated_mat(self, tmp_path, kept):
        content = mat(ff=np.random.default_rng(0).integers(0, 256, (560, 30)).astype(np.uint8))
        entry = small("freyfaces", tmp_path / "data", [content[: int(kept * len(content))]])
        with pytest.raises(DataError, match=r"^Cannot use .*frey_rawface\.mat: Expected"):
            load(entry, data_dir=tmp_path / "data")

    @pytest.mark.parametrize(
        ("matrices", "message"),
        [
            ({"faces": np.zeros((8, 3))}, "got no ff"),
            ({"ff": np.zeros((3, 8))}, r"4 x 2 pixels; got an array of shape \(8, 3\)"),
            ({"ff": np.zeros((8, 4))}, "Expected 3 images; got 4"),
        ],
    )
    def test_other_content_of_a_mat(self, tmp_path, matrices, message):
        entry = small("freyfaces", tmp_path / "data", [mat(**matrices)], image=(1, 4, 2), splits=(1, 1, 1))
        with pytest.raises(DataError, match=message):
            load(entry, data_dir=tmp_path / "data")

    @pytest.mark.parametrize("text", [b"", b"0 1 0\n", b"0 1 2 0\n", b"0,1,0,1\n", b"0 1 0 1 ", b"0 1\n0 1\n"])
    def test_other_text(self, tmp_path, text):
        entry = small("mnist", tmp_path / "data", [text] * 3, image=(1, 2, 2), splits=(1, 1, 1))
        with pytest.raises(DataError, match="Expected rows of 4 digits"):
            load(entry, data_dir=tmp_path / "data")

    def test_wrong_number_of_images(self, tmp_path):
        entry, _ = small_mnist(tmp_path / "data")
        with pytest.raises(DataError, match=r"valid images of shape \(6, 1, 4, 2\); got \(5, 1, 4, 2\)"):
            load(replace(entry, splits=(5, 6, 5)), data_dir=tmp_path / "data")

    def test_damaged_gzip(self, tmp_path):
        entry, _ = small_mnist(tmp_path / "data")
        path = tmp_path / "data" / "binarized_mnist_train.amat"
        (tmp_path / "data" / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes())[:-9])
        path.unlink()
        with pytest.raises(DataError, match="damaged or truncated"):
            load(entry, data_dir=tmp_path / "data")

    def test_a_few_megabytes_that_become_gigabytes(self, tmp_path):
        entry, _ = small_mnist(tmp_path / "data")
        path = tmp_path / "data" / "binarized_mnist_train.amat"
        path.unlink()
        with gzip.open(path.with_suffix(".amat.gz"), "wb", compresslevel=1) as file:
            for _ in range(200):
                file.write(bytes(2**20))
        tracemalloc.start()
        with pytest.raises(DataError, match=r"Expected at most .* bytes in .*train\.amat\.gz, plain; got more"):
            load(entry, data_dir=tmp_path / "data")
        assert tracemalloc.get_traced_memory()[1] < 3 * entry.largest_file
        tracemalloc.stop()

    @pytest.mark.parametrize("name", ["frey_rawface.mat", "frey_rawface.mat.gz", "mine.npz"])
    def test_a_pipe_is_not_waited_for(self, tmp_path, name):
        os.mkfifo(tmp_path / name)
        with pytest.raises(DataError, match=rf"Expected a file at .*{name}; got a pipe"):
            load(tmp_path / name) if name == "mine.npz" else load("freyfaces", data_dir=tmp_path)

    def test_no_published_file_exceeds_what_is_read_of_it(self):
        if not REAL.is_dir():
            pytest.skip("the published files are not here")
        for entry in CATALOGUE.values():
            for variant in entry.variants:
                for file in variant.files:
                    if (REAL / file.name).exists():
                        assert (REAL / file.name).stat().st_size < entry.largest_file

    def test_folders_and_files_in_each_others_place(self, tmp_path):
        (tmp_path / "frey_rawface.mat").mkdir()
        with pytest.raises(DataError, match=r"Expected a file at .*frey_rawface\.mat; got a folder"):
            load("freyfaces", data_dir=tmp_path)
        (tmp_path / "file").touch()
        with pytest.raises(DataError, match=r"Expected a folder of data files .*; got a file"):
            load("mnist", data_dir=tmp_path / "file")
        with pytest.raises(DataError, match=r"Expected a folder of data files .*; got nothing"):
            load("mnist", data_dir=tmp_path / "nowhere")

    @pytest.mark.parametrize(
        ("name", "message"),
        [("minst", "did you mean 'mnist'"), ("imagenet", "Expected one of digits, mnist")],
    )
    def test_unknown_name(self, name, message):
        with pytest.raises(DataError, match=message):
            load(name)

    @pytest.mark.parametrize("seed", [-1, 2**32])
    def test_seed_out_of_range(self, seed):
        with pytest.raises(DataError, match="Expected a seed"):
            load("digits", seed=seed)


class TestDownload:
    @pytest.fixture
    def server(self, tmp_path):
        """A web server over a folder, with the list of the paths that were asked for."""
        asked = []

        class Handler(SimpleHTTPRequestHandler):
            def log_message(self, *arguments):
                asked.append(self.path)

        (tmp_path / "remote").mkdir()
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=tmp_path / "remote"))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()
        server.server_close()
        thread.join()

    def test_happens_once(self, tmp_path, server, capfd):
        url, asked = server
        entry, rows = small_mnist(tmp_path / "remote", url=url)
        report = check(entry)
        assert not report.ok
        assert not asked
        dataset = load(entry)
        assert dataset.source == "download"
        np.testing.assert_array_equal(dataset.test.flatten(1), rows[2])
        assert len(asked) == 3
        assert fetch(entry).ok
        assert torch.equal(load(entry).test, dataset.test)
        assert len(asked) == 3
        assert capfd.readouterr() == ("", "")

    def test_shows_its_progress_when_asked(self, tmp_path, server, capfd):
        entry, _ = small_mnist(tmp_path / "remote", url=server[0])
        fetch(entry, progress=True)
        assert "binarized_mnist_train.amat" in capfd.readouterr().err

    def test_replaces_a_damaged_copy(self, tmp_path, server):
        entry, rows = small_mnist(tmp_path / "remote", url=server[0])
        load(entry)
        (files.cache_folder() / "binarized_mnist_test.amat").write_bytes(b"half a fi")
        np.testing.assert_array_equal(load(entry).test.flatten(1), rows[2])

    def test_keeps_nothing_that_fails_its_checksum(self, tmp_path, server):
        entry, _ = small_mnist(tmp_path / "remote", url=server[0])
        (tmp_path / "remote" / "binarized_mnist_train.amat").write_bytes(b"<html>moved</html>")
        with pytest.raises(DownloadError, match=r"train\.amat to have the checksum .* --data-dir"):
            load(entry)
        assert not list(files.cache_folder().iterdir())

    def test_never_happens_with_a_data_folder(self, tmp_path, server, monkeypatch):
        url, asked = server
        entry, _ = small_mnist(tmp_path / "remote", url=url)
        (tmp_path / "empty").mkdir()
        for action in (load, fetch):
            with pytest.raises(DataError, match="got neither"):
                action(entry, data_dir=tmp_path / "empty")
        monkeypatch.setenv("SYLVESTER_DATA", str(tmp_path / "empty"))
        with pytest.raises(DataError, match="got neither"):
            load(entry)
        assert not asked

    def test_failure_names_the_address_and_the_alternative(self, tmp_path, server):
        entry, _ = small_mnist(tmp_path / "remote", url=server[0])
        (tmp_path / "remote" / "binarized_mnist_train.amat").unlink()
        with pytest.raises(DataError, match=rf"{server[0]}/binarized_mnist_train\.amat.*404.*--data-dir"):
            load(entry)

    def test_no_connection(self, tmp_path):
        entry, _ = small_mnist(tmp_path / "remote", url="http://127.0.0.1:1")
        with pytest.raises(DownloadError, match=r"http://127\.0\.0\.1:1/.*; got no connection to the server: try"):
            load(entry)


class TestOwnImages:
    GREY = np.random.default_rng(0).integers(0, 256, (6, 8, 4)).astype(np.uint8)
    BINARY = (GREY > 128).astype(np.uint8)

    @staticmethod
    def saved(tmp_path, images=None, **arrays) -> Path:
        if images is not None:
            arrays = {"train": images[:3], "valid": images[3:5], "test": images[5:]} | arrays
        np.savez(tmp_path / "mine.npz", **{key: np.asarray(value) for key, value in arrays.items()})
        return tmp_path / "mine.npz"

    @pytest.mark.parametrize(
        ("images", "stored", "likelihood", "values"),
        [
            (BINARY, {}, "bernoulli", BINARY),
            (BINARY.astype(bool), {}, "bernoulli", BINARY),
            (255 * BINARY, {}, "bernoulli", BINARY),
            (BINARY.astype(np.float64), {}, "bernoulli", BINARY),
            (BINARY, {"dynamic": True}, "bernoulli", BINARY),
            (GREY, {"dynamic": 0}, "categorical", GREY / 255),
            (GREY, {}, "categorical", GREY / 255),
            (GREY / 255, {"likelihood": "categorical"}, "categorical", GREY / 255),
            (GREY / 300, {"likelihood": "gaussian"}, "gaussian", GREY / 300),
        ],
    )
    def test_likelihood_follows_from_the_values_or_is_stored(self, tmp_path, images, stored, likelihood, values):
        path = self.saved(tmp_path, images, **stored)
        dataset = load(path)
        assert dataset.likelihood == likelihood
        assert dataset.dynamic is False
        x = torch.cat([dataset.train, dataset.valid, dataset.test])
        assert x.shape == (6, 1, 8, 4)
        np.testing.assert_array_equal(x[:, 0], values.astype(np.float32))
        assert dataset.sha256 == {"mine.npz": hashlib.sha256(path.read_bytes()).hexdigest()}

    def test_dynamic_keeps_training_grey_and_binarizes_the_rest_by_seed(self, tmp_path):
        path = self.saved(tmp_path, self.GREY, dynamic=True)
        dataset, again, other = (load(path, seed=seed) for seed in (0, 0, 1))
        assert dataset.dynamic
        assert dataset.likelihood == "bernoulli"
        np.testing.assert_array_equal((255 * dataset.train[:, 0]).round(), self.GREY[:3])
        assert ((dataset.valid == 0) | (dataset.valid == 1)).all()
        assert torch.equal(dataset.valid, again.valid)
        assert not torch.equal(dataset.valid, other.valid)

    @pytest.mark.parametrize("channels", [1, 2, 3, 4])
    def test_channels_are_kept(self, tmp_path, channels):
        images = np.stack([self.GREY // (1 + channel) for channel in range(channels)], axis=1)
        first = load(str(self.saved(tmp_path, images)))
        assert first.image_shape == (channels, 8, 4)
        if channels in (1, 3):
            last = load(self.saved(tmp_path, np.moveaxis(images, 1, -1)))
            assert torch.equal(last.train, first.train)
            assert last.test.is_contiguous()

    def test_colours_first_are_not_taken_for_colours_last(self, tmp_path):
        images = np.stack([self.GREY[:, :, :3]] * 3, axis=1)  # (N, 3, 8, 3)
        assert load(self.saved(tmp_path, images)).image_shape == (3, 8, 3)

    def test_sides_need_not_be_multiples_of_four(self, tmp_path):
        assert load(self.saved(tmp_path, self.BINARY[:, :7, :3])).image_shape == (1, 7, 3)

    def test_without_validation_images_some_are_held_out_by_the_seed(self, tmp_path):
        images = np.random.default_rng(1).integers(0, 256, (40, 8, 4)).astype(np.uint8)
        path = self.saved(tmp_path, train=images[:30], test=images[30:])
        dataset, again, other = (load(path, seed=seed) for seed in (0, 0, 1))
        assert dataset.counts == {"train": 27, "valid": 3, "test": 10}
        np.testing.assert_array_equal((255 * dataset.test[:, 0]).round(), images[30:])
        parts = torch.cat([dataset.train, dataset.valid])[:, 0].mul(255).round().byte().numpy()
        assert sorted(map(bytes, parts)) == sorted(map(bytes, images[:30]))
        assert torch.equal(dataset.valid, again.valid)
        assert not torch.equal(dataset.valid, other.valid)

    @pytest.mark.parametrize(
        ("images", "stored", "likelihood", "message"),
        [
            (GREY / 300, {}, "gaussian", None),
            (GREY / 255, {}, "categorical", None),
            (GREY, {}, "gaussian", None),
            (GREY, {"likelihood": "categorical"}, "gaussian", None),
            (BINARY, {}, "categorical", None),
            (GREY, {}, "bernoulli", "got grey values"),
            (GREY / 300, {}, "categorical", "Expected values k/255"),
            (GREY, {"dynamic": True}, "gaussian", "Expected likelihood 'bernoulli' for images that are binarized"),
        ],
    )
    def test_the_likelihood_may_be_given(self, tmp_path, images, stored, likelihood, message):
        path = self.saved(tmp_path, images, **stored)
        if message is None:
            assert load(path, likelihood=likelihood).likelihood == likelihood
            return
        with pytest.raises(DataError, match=message):
            load(path, likelihood=likelihood)

    def test_a_published_dataset_may_have_another_likelihood_too(self):
        digits = load("digits", likelihood="gaussian")
        assert digits.likelihood == "gaussian"
        assert torch.equal(digits.train, load("digits").train)

    @staticmethod
    def header(*shape: int, dtype: str = "|u1") -> bytes:
        buffer = io.BytesIO()
        np.lib.format.write_array_header_1_0(buffer, {"descr": dtype, "fortran_order": False, "shape": shape})
        return buffer.getvalue()

    def packed(self, tmp_path, **members: bytes) -> Path:
        """An archive of images and of whatever else."""
        arrays = {}
        for split, images in (("train", self.BINARY), ("test", self.BINARY)):
            buffer = io.BytesIO()
            np.save(buffer, images)
            arrays[split] = buffer.getvalue()
        with zipfile.ZipFile(tmp_path / "mine.npz", "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in (arrays | members).items():
                archive.writestr(name if "." in name else f"{name}.npy", content)
        return tmp_path / "mine.npz"

    def test_what_is_not_asked_for_is_not_read(self, tmp_path):
        members = {"labels": self.header(10**13), "README.txt": b"hello", "objects": b"\x93NUMPY"}
        assert load(self.packed(tmp_path, **members)).counts["test"] == 6

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"hello", "Expected train to be a plain array; got something else"),
            (b"", "Expected train to be a plain array; got something else"),
            (header(10**6, 1000, 1000), "to fill 1,000,000,000,000 bytes; got 128 with its header"),
            (header(-1, 8, 4), "Expected train of shape"),
            (header(2, 8, 4) + bytes(63), "to fill 64 bytes; got 191"),
            (header(2, 8, 4) + bytes(65), "to fill 64 bytes; got 193"),
        ],
    )
    def test_a_member_that_is_no_array(self, tmp_path, content, message):
        with pytest.raises(DataError, match=f"^Cannot use .*{message}"):
            load(self.packed(tmp_path, train=content))

    def test_images_that_do_not_fit_into_memory_are_refused_before_they_are_read(self, tmp_path, monkeypatch):
        path = self.packed(tmp_path, train=self.header(200, 8, 4) + bytes(6400))
        assert load(path).counts["train"] == 180
        monkeypatch.setattr("sylvester.app.memory.available", lambda: 50_000)
        with pytest.raises(DataError, match=r"fit into memory, .*; got 6,592 pixels"):
            load(path)

    def test_a_byte_that_changed_is_noticed(self, tmp_path):
        path = self.saved(tmp_path, self.GREY)  # stored, not compressed
        content = bytearray(path.read_bytes())
        content[content.index(self.GREY[:3].tobytes()) + 5] ^= 1
        path.write_bytes(content)
        with pytest.raises(DataError, match="CRC"):
            load(path)

    @pytest.mark.parametrize(
        ("arrays", "message"),
        [
            ({"train": BINARY, "valid": BINARY}, r"got no test \(found: train, valid\)"),
            ({"train": BINARY[:1], "test": BINARY}, "Expected valid, or at least two images in train"),
            ({"images": np.zeros((6, 8, 8, 4))}, "last axis seems to be the channels: store numpy.moveaxis"),
            (
                {"images": BINARY, "valid": BINARY[:0]},
                r"at least one image in valid; got the shape \(0, 8, 4\)",
            ),
            (
                {"images": BINARY, "test": BINARY.swapaxes(1, 2)},
                r"got \(8, 4\) in train and \(4, 8\) in test",
            ),
            ({"images": BINARY, "test": BINARY / 1.0}, "uint8 in train and float64 in test"),
            ({"images": BINARY.reshape(6, 32)}, r"\(N, C, H, W\) or \(N, H, W, C\); got \(3, 32\)"),
            ({"images": GREY.astype(np.int64)}, "Expected uint8, bool or float images; got int64"),
            ({"images": GREY / 100}, r"values in \[0, 1\]; got 0.* to 2\.[0-9]* in train"),
            ({"images": BINARY - 0.5}, r"values in \[0, 1\]; got -0\.5"),
            ({"images": np.where(BINARY, np.nan, 0)}, "got NaN in train"),
            ({"images": GREY / 255}, "Expected a likelihood for grey float images; got none: give --likelihood"),
            ({"images": GREY, "likelihood": "bernoulli"}, "got grey values: store dynamic"),
            (
                {"images": GREY, "likelihood": "poisson"},
                "one of bernoulli, categorical, gaussian; got 'poisson'",
            ),
            ({"images": GREY, "likelihood": ["a", "b"]}, "Expected likelihood to be one value"),
            ({"images": GREY, "dynamic": "yes"}, "Expected dynamic to be one value"),
            (
                {"images": GREY, "dynamic": True, "likelihood": "gaussian"},
                "Expected likelihood 'bernoulli' for images that are binarized",
            ),
            ({"images": GREY / 300, "likelihood": "categorical"}, "Expected values k/255"),
            ({"images": np.full((6, 8, 4), None)}, "Expected train to be a plain array; got Python objects"),
        ],
    )
    def test_what_cannot_be_used_is_refused_in_a_sentence(self, tmp_path, arrays, message):
        path = self.saved(tmp_path, **arrays)
        with pytest.raises(DataError, match=message) as caught:
            load(path)
        assert str(caught.value).startswith(f"Cannot use {path}: Expected")
        report = check(path)
        assert not report.ok
        assert report.problem == str(caught.value)

    def test_files_that_are_no_archives(self, tmp_path):
        with pytest.raises(DataError, match=r"Expected a readable file at .*; got the error No such file"):
            load(tmp_path / "nowhere.npz")
        with pytest.raises(DataError, match="got a folder"):
            load(tmp_path)
        path = self.saved(tmp_path, self.GREY)
        path.write_bytes(path.read_bytes()[:-40])
        with pytest.raises(DataError, match=r"Expected an \.npz archive"):
            load(path)
        np.save(tmp_path / "one.npy", self.GREY)
        with pytest.raises(DataError, match=r"Expected an \.npz archive .*not a zip file"):
            load(tmp_path / "one.npy")

    def test_check_counts_and_serialises(self, tmp_path):
        path = self.saved(tmp_path, self.GREY)
        report = asdict(fetch(path))
        assert report["ok"]
        assert report["counts"] == {"train": 3, "valid": 2, "test": 1}
        assert report["files"][0]["got"] == f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
