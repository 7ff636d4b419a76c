"""If a function fails on one rank, the other ranks get the same error as after a failed script."""

from __future__ import annotations

import contextlib
import io

import pytest

import horovod


@pytest.mark.parametrize("how", ["raises", "exits"])
def test_other_ranks_hear_that_the_function_of_a_rank_has_failed(how: str) -> None:
    def work(how):
        import sys

        import numpy

        import horovod.numpy as hvd

        hvd.init()
        if hvd.rank() == 1:
            if how == "exits":
                sys.exit(3)
            raise KeyError("no such column")
        try:
            hvd.allreduce(numpy.ones(3))
        except hvd.HorovodInternalError as error:
            print("rank 0 was told:", error)
            raise

    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(RuntimeError) as caught:
        horovod.run(work, (how,), num_proc=2)
    printed = out.getvalue()
    assert "rank 0 was told" in printed
    assert "the script of rank 1 has ended with an exception" in printed, printed
    assert "hvd.join()" not in printed
    assert ("no such column" if how == "raises" else "sys.exit(3)") in str(caught.value)


def test_the_error_of_a_function_names_its_file_and_line() -> None:
    def work():
        return [int(word) for word in ("1", "two")]

    with contextlib.redirect_stdout(io.StringIO()), pytest.raises(RuntimeError) as caught:
        horovod.run(work, num_proc=1)
    printed, code = str(caught.value.__cause__), work.__code__
    assert f'File "{code.co_filename}", line {code.co_firstlineno + 1}, in work' in printed
    assert "<dynamic-code>" not in printed
    assert 'for word in ("1", "two")' in printed, "the line itself, where the file is there"
