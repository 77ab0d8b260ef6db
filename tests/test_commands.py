"""Every command that a document prints is one that the command line takes, with its options, ops, kernels and peers."""

import pytest

import commands

FOUND = commands.in_documents()


@pytest.mark.parametrize("command", FOUND, ids=str)
def test_a_printed_command_is_taken(command, monkeypatch):
    monkeypatch.chdir(commands.ROOT)
    for plain in commands.variants(command.text):
        try:
            commands.require_taken(plain, monkeypatch)
        except commands.Refused as why:
            pytest.fail(
                f"{command.document.name}, line {command.line}: `{plain}` is refused: {why}; print one that is not"
            )


def test_there_are_commands_in_fences_in_chains_and_in_lines():
    texts = {command.text for command in FOUND}
    assert len(FOUND) > 90 and {command.document.name for command in FOUND} >= {
        "README.md",
        "matmul.md",
        "CONTRIBUTING.md",
    }
    assert "tilery bench matmul rms_norm silu_mul softmax" in texts, "behind &&"
    assert "tilery doctor --measure" in texts, "inline"
    assert "tilery doctor" in texts, "without its explanation"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("tilery bench matmul --rounds 5", "6"),
        ("tilery bench matmul --round 6", "No such option"),
        ("tilery bench matmul --rounds", "requires an argument"),
        ("tilery bench matmull", "OP must be one of"),
        ("tilery bench matmul -b cuda.blackwell", "--backend must be one of"),
        ("tilery bench matmul --peers cublas", "--peers must be"),
        ("tilery bench matmul --shapes llama-9b", "llama-9b"),
        ("tilery bench matmul --case m=1,n=2", "needs k"),
        ("tilery bench softmax --csv-form pairs", "--csv-form pairs is for"),
        ("tilery tune matmul --search best", "search must be one of"),
        ("tilery tune matmul --model llama-9b", "llama-9b"),
        ("tilery ladder fast", "RUNG must be"),
        ("tilery show matmul -b triton --stage sas", "--stage must be"),
        ("tilery plot --kind bars x", "--kind must be"),
        ("tilery configs exports", "got 'exports'"),
        ("tilery benchmark", "got 'benchmark'"),
        ("python benchmarks/before_after.py old softmax --turns 5", "unrecognized arguments"),
        ("python benchmarks/host_time.py softmaxx", "softmaxx"),
        ("python benchmarks/hosttime.py", "got benchmarks/hosttime.py"),
    ],
)
def test_what_is_refused_is_found(text, reason, monkeypatch):
    with pytest.raises(commands.Refused, match=reason):
        commands.require_taken(text, monkeypatch)


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("check [OP…] [--backend B]", ["check", "check matmul", "check matmul --backend triton"]),
        ("tune matmul --bits any|stable", ["tune matmul --bits any", "tune matmul --bits stable"]),
        (
            "configs [show OP | export [--format sglang]]",
            ["configs", "configs show matmul", "configs export", "configs export --format sglang"],
        ),
        ("bench bmm --case m=…,n=…,k=…,dtype=bf16", ["bench bmm --case m=128,n=128,k=128,dtype=bf16"]),
        ("tune [OP…] [--N … --K …]", ["tune", "tune matmul", "tune matmul --N 4096 --K 8192"]),
    ],
)
def test_a_synopsis_is_made_plain(text, plain):
    assert commands.variants(text) == plain


def test_a_value_that_is_left_out_must_be_known():
    with pytest.raises(KeyError, match="--budget"):
        commands.variants("tune matmul --budget …")
