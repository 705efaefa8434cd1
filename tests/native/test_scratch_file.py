"""The file of a history under a timer's signals."""

import pathlib
import subprocess

import pytest

from mpigrad.waves.native_run import library

pytestmark = pytest.mark.ranks(1)
NATIVE = pathlib.Path(__file__).resolve().parents[2] / "native"
# Each call of fallocate is interrupted, as under a profiler's timer.
PROGRAM = """
#include "storage/scratch_file.h"
int interrupted = 0;
extern "C" int fallocate(int, int, off_t, off_t) { ++interrupted; errno = EINTR; return -1; }
int main(int, char** words) {
  mpigrad::storage::ScratchFile file(words[1], "history", "", 8192, 3);
  std::string data(8192, 'x'), back(8192, ' ');
  std::string error = file.error();
  error += file.write(2, data.data());
  error += file.read(2, back.data());
  std::printf("%d %d %s", interrupted, data == back, error.c_str());
}
"""


def test_reserving_a_file_ends_if_signals_interrupt_it(tmp_path):
    source, program = tmp_path / "interrupted.cc", tmp_path / "interrupted"
    source.write_text(PROGRAM)
    words = ["c++", "-std=c++17", "-O0", f"-I{NATIVE}", str(source), "-o", str(program)]
    subprocess.run(words, check=True)
    done = subprocess.run(
        [program, tmp_path], capture_output=True, text=True, timeout=30, check=True
    )
    tries, same, error = done.stdout.split(" ", 2)
    assert (1 < int(tries) < 100, same, error) == (True, "1", "")


def test_a_run_that_was_freed_gets_no_data():
    library().mpigrad_waves_points(2**40, 0, 0, None, None, None)
    library().mpigrad_waves_free(2**40)
