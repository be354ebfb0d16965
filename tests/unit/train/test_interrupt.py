import os
import signal
import subprocess
import sys

import pytest

from gracetune.train.run import SignalHandler


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_only_noted(number, capsys):
    before = signal.getsignal(number)
    with SignalHandler() as interrupt, interrupt.deferred():
        assert interrupt.received is None
        os.kill(os.getpid(), number)
        assert interrupt.received == number.name
    assert signal.getsignal(number) is before
    assert "finishing the step" in capsys.readouterr().err


def test_the_second_leaves_at_once():
    script = (
        "import os, signal, time\n"
        "from gracetune.train.run import Interrupt\n"
        "with Interrupt() as interrupt, interrupt.between_steps():\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print('still here')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 130
    assert "still here" not in done.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_before_the_first_step_either_ends_the_run_at_once(number):
    with pytest.raises(KeyboardInterrupt), SignalHandler():
        os.kill(os.getpid(), number)
        signal.pause()
