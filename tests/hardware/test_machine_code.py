"""The search for uniform registers that machine code reads and never wrote, in code made up for it."""

import pytest

from tilery.hardware.machine_code import unset_in

START = ["UMOV UR2, 0x1", "UMOV UR3, 0x2"]


def found(*lines):
    """What is unset in these instructions, which lie at 0x00, 0x10, 0x20 …"""
    body = [f"        /*{16 * i:04x}*/    {line} ;    /* 0x000000040c047897 */" for i, line in enumerate(lines)]
    return set(unset_in("\n".join(["\t\tFunction : _one", *body])))


@pytest.mark.parametrize(
    ("lines", "unset"),
    [
        (["UIADD3 UR4, UP0, UR4, 0x20, URZ", "EXIT"], {4}),
        (["ULDC.64 UR4, c[0x0][0x210]", "LDG.E R2, desc[UR4][R2.64]", "EXIT"], set()),
        (["ULDC UR4, c[0x0][0x210]", "LDG.E R2, desc[UR4][R2.64]", "EXIT"], {5}),
        (["R2UR UR6, R3", "R2UR UR7, R4", "HGMMA.64x16x16.F32 R8, R4, gdesc[UR4].tnspB, R8, gsb0", "EXIT"], set()),
        (["R2UR UR6, R3", "R2UR UR7, R4", "HGMMA.64x16x16.F32 R8, gdesc[UR4], R8, gsb0", "EXIT"], {4, 5}),
        ([*START, "UIMAD.WIDE UR4, UR2, UR3, URZ", "UMOV UR6, UR5", "EXIT"], set()),
        ([*START, "UIMAD.WIDE UR4, UR2, 0x4, UR6", "EXIT"], {6, 7}),
        (["UMOV UR2, 0x1", "UPRMT UR4, UR2, 0x7632, UR4", "EXIT"], set()),  # half of a register, and whatever above it
        (["UMOV UR2, 0x1", "UPRMT UR4, UR3, 0x7632, UR4", "EXIT"], {3}),
        (["UMOV UR2, 0x1", "UPRMT UR4, UR2, 0x5410, UR4", "EXIT"], {4}),  # both halves
        (["UMOV UR2, 0x1", "UPRMT UR4, UR2, 0x7632, UR5", "EXIT"], {5}),
        (["@P0 BRA 0x20", "UMOV UR2, 0x1", "UMOV UR3, UR2", "EXIT"], {2}),  # on one of two paths
        (["BRA P2, 0x20", "UMOV UR2, 0x1", "UMOV UR3, UR2", "EXIT"], {2}),
        (["BRA 0x20", "UMOV UR3, UR2", "EXIT"], set()),  # no path comes there
        (["@P0 EXIT", "UMOV UR3, UR2", "EXIT"], {2}),
        (["UMOV UR2, 0x1", "UIADD3 UR2, UR2, 0x1, URZ", "@!P1 BRA 0x10", "EXIT"], set()),  # a loop
        (["UIADD3 UR3, UR2, 0x1, URZ", "UMOV UR2, 0x1", "@!P1 BRA 0x0", "EXIT"], {2}),  # its first turn
    ],
)  # fmt: skip
def test_registers_that_some_path_has_not_set(lines, unset):
    assert found(*lines) == unset
