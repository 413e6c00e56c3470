"""What the learner does beside learning; tests/rl/test_loop.py has it learn."""

import torch

from octavo.rl import learner


def test_host_math_beside_a_gpu_takes_one_thread_and_gives_the_others_back() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with learner._host_math(torch.device("cpu")):
            assert torch.get_num_threads() == 2
        with learner._host_math(torch.device("cuda")):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
