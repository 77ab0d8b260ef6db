"""`tilery configs`: listed, shown, exported, imported here and from a sister device, verified and mended."""

import dataclasses
import json

import pytest
import torch
from typer.testing import CliRunner

import plant
from plant import TILES
from tilery.base import settings
from tilery.base.errors import BadInput, BadTunedFile
from tilery.base.spec import Case
from tilery.cli import app
from tilery.core import tuned
from tilery.core.cases import call_for, specs_for
from tilery.core.tuned import Entry
from tilery.hardware import device
from tilery.ops import matmul, softmax
from tilery.tuning import verify
from tilery.tuning.data import Built, Measured

CPU = torch.device("cpu")
SLUG = device.slug(CPU)
CASE = {"m": 64, "n": 96, "dtype": "fp32"}
SPECS = specs_for(softmax, Case(CASE), "cpu")
BUCKET = softmax.bucket(softmax.call(SPECS))
DEFAULT, OTHER = ({"tile": tile, "kind": "plain"} for tile in (8, 3))


def entry(config=DEFAULT, case=CASE, kernel=TILES, **more):
    bucket = softmax.bucket(call_for(softmax, Case(case), "cpu")) if case else BUCKET
    evidence = {"ms": 1e3, "interval": [1e3, 1e3], "error": 1e-7, "bit_identical": True, "roof": 0.5}
    stamp = {"versions": tuned.versions("numba", CPU), "device": device.name(CPU), "when": "2026-01-01T00:00:00+00:00"}
    built = {"registers": None, "spills": None}
    made = {"kernel": kernel, "exact": bucket.exact, "scaled": bucket.scaled, "config": config, "case": case}
    return Entry(**(made | evidence | stamp | built | more))


@pytest.fixture(autouse=True)
def folder(ship, monkeypatch):
    """A user's folder of this test's own. softmax has a kernel to tune, which runs if nothing is tuned."""
    plant.add(monkeypatch, softmax, TILES, plant.Tiles(), first=True)
    monkeypatch.setenv("COLUMNS", "300")  # the path of a test's folder fits in a line
    return settings.get().config_dir


def run(*words, code=0):
    done = CliRunner().invoke(app, ["configs", *words])
    assert done.exit_code == code, (done.output, done.exception)
    return done.stdout


def run_json(*words, code=0):
    return json.loads(run(*words, "--json", code=code))


def fails(error, match, *words):
    done = CliRunner().invoke(app, ["configs", *words])
    with pytest.raises(error, match=match):
        raise done.exception


# List and show


def test_list_counts_buckets_and_stale_entries(folder):
    assert run() == run("list") == "nothing is tuned yet: `tilery tune OP` does it\n"
    path = tuned.write(softmax, SLUG, [entry(), entry(OTHER, rank=1, versions={"numba": "0.1"})])
    tuned.write(softmax, SLUG, [entry(case=CASE | {"m": 128})])
    tuned.write_candidates(softmax, SLUG, [entry(origin="NVIDIA H100")])
    yours, brought = run_json("list")["files"]
    counts = {"buckets": 2, "entries": 3, "stale": 1}
    names = {"op": "softmax", "device": SLUG, "owner": "yours", "path": str(path), "failure": ""}
    assert yours == names | counts and (brought["owner"], brought["entries"]) == ("candidates", 1)
    said = run("list", "softmax")
    assert str(path) in said and "yours" in said and "candidates" in said
    assert run_json("list", "matmul")["files"] == []


def test_list_names_a_corrupt_file_and_the_others(folder):
    good = tuned.write(softmax, SLUG, [entry()])
    (good.parent / "nvidia_h200.json").write_text("{")
    (folder / "warp_drive").mkdir()
    (folder / "warp_drive" / "x.json").write_text("{}")
    found = run_json("list", code=1)
    assert sorted(each["entries"] for each in found["files"]) == [0, 1] and "nvidia_h200.json:1: " in run(
        "list", code=1
    )
    assert found["strangers"] == [str(folder / "warp_drive" / "x.json")]


def test_show_prints_winner_and_those_behind_it():
    tuned.write(softmax, SLUG, [entry(), entry(OTHER, rank=1, ms=2e3, origin="NVIDIA H100", versions={"numba": "0.1"})])
    said = run("show", "softmax")
    for text in (BUCKET.exact, "m=64,", "tile=", "1000", "1.0e-07", "50%", "NVIDIA H100", "stale: numba 0.1, now "):
        assert text in said
    first, second = run_json("show", "softmax", "--device", SLUG)["entries"]
    assert (first["rank"], first["config"], first["stale"]) == (0, DEFAULT, []) and second["origin"] == "NVIDIA H100"


def test_show_of_what_is_not_there_says_what_is(folder):
    fails(BadInput, "matmul has no tuned configs; there are none", "show", "matmul")
    path = tuned.write(softmax, SLUG, [entry()])
    fails(BadInput, f"softmax has no tuned configs of 'warp'; there are {SLUG}", "show", "softmax", "--device", "warp")
    path.write_text("nonsense")
    tuned.reload()
    fails(BadTunedFile, r"\.json:1: Expecting value", "show", "softmax")


# Export and import


def test_an_export_comes_back_as_it_was(tmp_path):
    path, out = tuned.write(softmax, SLUG, [entry(), entry(OTHER, rank=1)]), tmp_path / "out.json"
    before = path.read_bytes()
    assert run("export", "softmax", "--to", str(out)) == f"2 entries of 1 ops in {out}\n"
    path.unlink()
    tuned.reload()
    assert "2 entries, 0 candidates, 0 refused" in run("import", str(out))
    assert path.read_bytes() == before and softmax.plan(SPECS).source == "tuned"


def test_one_file_of_tuned_configs_is_imported_too(tmp_path):
    path = tuned.write(softmax, SLUG, [entry()], tmp_path / "elsewhere")
    assert run_json("import", str(path))["imported"][0]["kept_as"] == "entry"
    assert softmax.plan(SPECS).source == "tuned"


def test_export_holds_several_ops_and_what_is_used_of_them(tmp_path, ship):
    large = CASE | {"m": 128}
    ship(softmax, SLUG, entry(), entry(OTHER, large))
    tuned.write(softmax, SLUG, [entry(OTHER)])
    of_matmul = dataclasses.replace(entry(case=None), kernel="numba", config={})
    tuned.write(matmul, "nvidia_h100", [of_matmul])
    found = run_json("export", "--to", str(tmp_path / "all.json"))["exported"]
    assert {(e["op"], e["device"], e["entries"]) for e in found} == {("softmax", SLUG, 2), ("matmul", "nvidia_h100", 1)}
    files = {each["op"]: each for each in json.loads((tmp_path / "all.json").read_text())["files"]}
    assert [e["config"] for e in files["softmax"]["entries"]] == [OTHER, OTHER]  # the user's over what is shipped
    found = run_json("export", "--to", str(tmp_path / "one.json"), "--device", SLUG)["exported"]
    assert [e["op"] for e in found] == ["softmax"]
    words = ("export", "--to", str(tmp_path / "x.json"), "--device", "warp")
    fails(BadInput, "nothing is tuned of .* on warp", *words)
    fails(BadInput, "must lie in a folder that is there", "export", "--to", str(tmp_path / "no" / "x.json"))


def sister(tmp_path, *entries, slug="cpu_sister", op=softmax):
    """A file of a device that this machine is not."""
    return str(tuned.write(op, slug, [dataclasses.replace(e, device="CPU sister") for e in entries], tmp_path / slug))


def test_a_sisters_entries_become_candidates_but_for_what_cannot_run_here(tmp_path, folder):
    path = sister(tmp_path, entry(), entry({"tile": 9}, rank=1), entry(case=None, ms=2.0, rank=2))
    assert "0 entries, 2 candidates, 1 refused" in (said := run("import", path))
    assert f"softmax {TILES} refused: tile of 9 is more than 8" in said and "verify --fix" in said
    assert softmax.plan(SPECS).source == "default"
    found = (BUCKET.exact, BUCKET.scaled, TILES, DEFAULT, "CPU sister")
    assert tuned.candidates(softmax, SLUG) == [found, found]
    run("import", path)
    assert len(tuned.candidates(softmax, SLUG)) == 2  # again: nothing twice


def test_this_devices_entries_are_candidates_if_asked(tmp_path):
    path = tuned.write(softmax, SLUG, [entry()], tmp_path / "elsewhere")
    run("import", str(path), "--as-candidates")
    assert softmax.plan(SPECS).source == "default"
    assert [found[-1] for found in tuned.candidates(softmax, SLUG)] == [device.name(CPU)]


def test_a_gpus_configs_are_refused_without_one(tmp_path, without_a_gpu):
    path = sister(tmp_path, entry(), slug="nvidia_h100")
    assert "1 refused" in (said := run("import", path)) and "needs a GPU, and this machine has none" in said
    assert tuned.candidates(softmax, SLUG) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ((TILES, "warp_drive"), r":2: softmax has no kernel 'warp_drive', it has "),
        (('"rank"', '"ranks"'), r":2: entry lacks \['rank'\], has unknown \['ranks'\]"),
        (('"schema": 1', '"schema": 2'), r":1: expected .*, got schema 2"),
        (('"tile"', '"tile_q"'), r":2: numba\.tiles has no config .*tile_q"),
        (('"op": "softmax"', '"op": "warp"'), r":1: there is no op 'warp', only "),
        (('"n": 96', '"n": 97'), r":2: its case is of .*n=97.*, the entry says .*n=96"),
        (('"n": 96', '"warp": 96'), r":2: softmax has no case .*warp"),
    ],
)
def test_a_bad_import_is_named_by_line_and_nothing_is_kept(tmp_path, folder, change, message):
    path = tuned.write(softmax, SLUG, [entry()], tmp_path / "elsewhere")
    path.write_text(path.read_text().replace(*change))
    fails(BadTunedFile, message, "import", str(path))
    assert not folder.exists()


def test_the_line_of_a_bad_entry_in_an_export_is_its_own(tmp_path):
    tuned.write(softmax, "cpu_a", [entry(), entry(OTHER, rank=1)])
    tuned.write(softmax, "cpu_b", [entry(), entry(OTHER, rank=1)])
    out = tmp_path / "out.json"
    run("export", "softmax", "--to", str(out))
    lines = out.read_text().splitlines()
    assert '"cpu_b"' in lines[5]
    lines[7] = lines[7].replace(f'"{TILES}"', "1", 1)
    out.write_text("\n".join(lines))
    fails(BadTunedFile, r"out\.json:8: kernel must be str, got 1", "import", str(out))
    fails(BadInput, "FILE must be an export .* which is not there", "import", str(tmp_path / "nowhere.json"))


# Verify


class Fake:
    """A worker that answers by config: (status, ms)."""

    answers: dict[str, tuple[str, float]]

    def __init__(self, *_):
        self.jobs = []

    def measure(self, job, progress):
        self.jobs.append(job)
        return [self._measured(c) for c in job.candidates]

    def _measured(self, candidate):
        status, ms = self.answers.get(str(candidate.config), ("good", 1e3))
        samples = tuple(ms * (1 + 1e-4 * (i % 3)) for i in range(8)) if status == "good" else ()
        return Measured(candidate, status, "" if status == "good" else "as planted", samples, samples, 2e-7)

    def close(self):
        pass


@pytest.fixture
def measured(monkeypatch):
    def answer(found):
        Fake.answers = {str(config): said for config, said in found}
        monkeypatch.setattr("tilery.tuning.pool.Worker", Fake)

    answer([])
    return answer


def verdicts(*words, code):
    return [(row["status"], row["reason"]) for row in run_json("verify", *words, code=code)["rows"]]


def test_verify_passes_what_is_as_it_says(measured):
    assert "nothing is tuned for this machine" in run("verify")
    tuned.write(softmax, SLUG, [entry(), entry(OTHER, rank=1)])
    assert verdicts(code=0) == [("pass", ""), ("pass", "")]
    assert verdicts("matmul", code=0) == []


@pytest.mark.parametrize(
    ("given", "found", "reason"),
    [
        ({"versions": {"numba": "0.1"}}, ("good", 1e3), "stale: numba 0.1, now "),
        ({}, ("wrong", 1.0), "wrong: as planted"),
        ({}, ("hung", 1.0), "hung: as planted"),
        ({}, ("good", 1.2e3), "slower: 1200 ms, said 1000 (1.20 times)"),
        ({"config": {"tile": 9}}, ("good", 1e3), "refused: tile of 9 is more than 8"),
        ({"config": {"tile_q": 7}}, ("good", 1e3), "refused: "),
        ({"case": None, "exact": "n=1", "versions": {"numba": "0.1"}}, ("good", 1e3), "stale: numba 0.1, now "),
        ({"case": CASE | {"warp": 1}}, ("good", 1e3), "refused: "),
    ],
)
def test_verify_says_what_is_stale_wrong_or_slower(measured, given, found, reason):
    config = given.get("config", OTHER)
    tuned.write(softmax, SLUG, [dataclasses.replace(entry(config), **given)])
    measured([(config, found)])
    ((status, said),) = verdicts(code=1)
    assert status == "fail" and said.startswith(reason)
    assert "verify --fix" in run("verify", code=1)


@pytest.mark.parametrize(("ms", "interval"), [(1.04e3, [1e3, 1e3]), (1.2e3, [0.9e3, 1.3e3])])
def test_within_five_per_cent_or_the_interval_is_not_slower(measured, ms, interval):
    tuned.write(softmax, SLUG, [entry(OTHER, interval=interval)])
    measured([(OTHER, ("good", ms)), (DEFAULT, ("good", ms))])
    assert verdicts(code=0) == [("pass", "")]


def test_an_entry_whose_arguments_are_not_kept_is_skipped_and_said(measured):
    tuned.write(softmax, SLUG, [entry(case=None)])
    ((status, reason),) = verdicts(code=0)
    assert status == "skipped" and "a call's own arguments" in reason


def test_an_entry_without_a_case_is_measured_on_one_the_op_knows(measured):
    known = softmax.cases["bench_cpu"][0]
    made = dataclasses.replace(entry(case=known.params), case=None)
    tuned.write(softmax, SLUG, [made])
    (row,) = run_json("verify")["rows"]
    assert row["status"] == "pass" and row["case"] == str(known)


def test_fix_drops_what_is_wrong_and_ranks_by_todays_times(measured):
    path = tuned.write(softmax, SLUG, [entry(OTHER, versions={"numba": "0.1"})])
    measured([(OTHER, ("wrong", 1.0)), (DEFAULT, ("good", 900.0))])
    assert "1 buckets were written anew" in run("verify", "--fix")
    (kept_now,) = tuned.read(path, softmax)
    assert (kept_now.config, kept_now.rank, kept_now.error, kept_now.origin) == (DEFAULT, 0, 2e-7, "")
    assert kept_now.ms == pytest.approx(900, rel=1e-3) and tuned.stale(kept_now) == [] and kept_now.case == CASE
    assert run_json("verify")["rows"][0]["status"] == "pass"


def test_fix_keeps_the_first_of_those_alike(measured):
    path = tuned.write(softmax, SLUG, [entry(OTHER, versions={"numba": "0.1"})])
    measured([(OTHER, ("good", 1e3)), (DEFAULT, ("good", 0.995e3))])
    run("verify", "--fix")
    assert [e.config for e in tuned.read(path, softmax)] == [OTHER]


def test_an_entry_slower_than_the_default_fails_and_is_fixed(measured):
    path = tuned.write(softmax, SLUG, [entry(OTHER)])
    measured([(OTHER, ("good", 1e3)), (DEFAULT, ("good", 900.0))])
    ((status, reason),) = verdicts("--fix", code=0)
    assert status == "fail"
    assert reason == f"slower than what runs untuned: 1000 ms, {TILES} by default 900.1 (1.11 times)"
    assert [e.config for e in tuned.read(path, softmax)] == [DEFAULT]


def test_the_entry_that_dispatch_takes_is_held_against_the_default_behind_it(measured):
    path = tuned.write(softmax, SLUG, [entry(OTHER), entry(rank=1)])
    measured([(OTHER, ("good", 1e3)), (DEFAULT, ("good", 900.0))])
    (first, reason), behind = verdicts("--fix", code=0)
    assert (first, behind) == ("fail", ("pass", "")) and reason.startswith("slower than what runs untuned")
    assert tuned.read(path, softmax)[0].config == DEFAULT


@pytest.mark.parametrize("ms", [995.0, 1100.0])
def test_an_entry_as_fast_as_the_default_passes(measured, ms):
    tuned.write(softmax, SLUG, [entry(OTHER)])
    measured([(OTHER, ("good", 1e3)), (DEFAULT, ("good", ms))])
    assert verdicts(code=0) == [("pass", "")]


def test_a_shipped_entry_is_verified_and_mended_in_the_users_folder(measured, ship):
    path = ship(softmax, SLUG, entry(OTHER))
    before = path.read_bytes()
    measured([(OTHER, ("wrong", 1.0))])
    assert verdicts("--fix", code=0) == [("fail", "wrong: as planted")]
    assert path.read_bytes() == before and dataclasses.asdict(softmax.plan(SPECS).config) == DEFAULT
    assert softmax.plan(SPECS).source == "tuned" and verdicts(code=0) == [("pass", "")]


def test_what_cannot_be_fixed_stays_and_fails(measured):
    path = tuned.write(softmax, SLUG, [entry(OTHER)])
    before = path.read_bytes()
    measured([(OTHER, ("wrong", 1.0)), (DEFAULT, ("crashed", 1.0))])
    run("verify", "--fix", code=1)
    assert path.read_bytes() == before


def test_a_fast_candidate_becomes_the_entry_with_its_origin(measured, tmp_path):
    run("import", sister(tmp_path, entry(OTHER)))
    measured([(OTHER, ("good", 500.0))])
    ((status, reason),) = verdicts(code=0)
    assert (status, reason) == ("pass", "candidate from CPU sister") and softmax.plan(SPECS).source == "default"
    run("verify", "--fix")
    (won,) = tuned.read(settings.get().config_dir / "softmax" / f"{SLUG}.json", softmax)
    assert (won.config, won.origin, won.device) == (OTHER, "CPU sister", device.name(CPU))
    assert dataclasses.asdict(softmax.plan(SPECS).config) == OTHER
    assert verdicts(code=0) == [("pass", "")]  # an entry now, and no candidate besides


def test_a_wrong_candidate_fails_nothing_and_is_not_kept(measured, tmp_path):
    run("import", sister(tmp_path, entry(OTHER)))
    measured([(OTHER, ("wrong", 500.0))])
    ((status, reason),) = verdicts("--fix", code=0)
    assert (status, reason) == ("skipped", "candidate from CPU sister; wrong: as planted")
    assert dataclasses.asdict(softmax.plan(SPECS).config) == DEFAULT


class Compilers:
    """A pool whose compiler spills every config but the default."""

    compilers = 1

    def __init__(self):
        self.workers = [Fake()]

    def compile(self, op, kernel, specs, arch, config):
        return Built(registers=64, spills=0 if dataclasses.asdict(config) == DEFAULT else 16)


def test_what_spills_is_not_measured_and_evidence_is_renewed(measured):
    """Compilers are asked on a GPU alone: the step is taken by hand."""
    path = tuned.write(softmax, SLUG, [entry(OTHER), entry(rank=1)])
    (group,) = verify.groups([softmax])
    pool = Compilers()
    verify._find_case(group)
    verify._compile(group, group.items, pool)
    assert group.items[0].problems == ["spills: 16 bytes a thread"] and not group.items[0].good
    verify.measure(group, pool)
    assert [c.config for c in pool.workers[0].jobs[0].candidates] == [DEFAULT] and not group.sound
    assert verify.fix(group)
    assert [(e.config, e.registers, e.spills) for e in tuned.read(path, softmax)] == [(DEFAULT, 64, 0)]


def test_what_an_older_tilery_wrote_is_measured_and_fixed_under_the_names_of_now(measured):
    path = tuned.write(softmax, SLUG, [entry({"block": 3, "kind": "simple"}, versions={"numba": "0.1"})])
    measured([(OTHER, ("good", 900.0))])
    ((status, reason),) = verdicts(code=1)
    assert status == "fail" and reason.startswith("stale: numba 0.1")
    run("verify", "--fix")
    assert [e.config for e in tuned.read(path, softmax)] == [OTHER]


def test_verify_measures_in_a_real_worker():
    """A kernel that a child has too. A time that nothing takes is never reached, one that is long always is."""
    fast, slow = ({"parallel": parallel} for parallel in (True, False))
    path = tuned.write(
        softmax,
        SLUG,
        [entry(slow, kernel="numba", ms=1e9, interval=[1e9, 1e9]),
         entry(fast, kernel="numba", rank=1, ms=1e-9, interval=[1e-9, 1e-9])],
    )  # fmt: skip
    first, second = run_json("verify", "softmax", code=1)["rows"]
    assert not first["reason"].startswith("slower:") and 0 < first["ms"] < 1e9 and 0 < first["error"] < 1e-5
    assert second["status"] == "fail" and second["reason"].startswith("slower: ")
    assert len(tuned.read(path, softmax)) == 2
