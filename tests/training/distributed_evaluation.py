"""One rank of `test_two_ranks_score_their_shares_and_both_get_the_whole`: RENDEZVOUS OUT."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from expertcast.training.evaluation import evaluate
from tests.training.synthetic import random_batch, tiny_view
from tests.training.test_evaluation import quasi


def main() -> None:
    rank = int(os.environ["RANK"])
    torch.distributed.init_process_group("gloo", init_method=sys.argv[1], rank=rank, world_size=2)
    view = tiny_view()
    batch = random_batch(view, 50)
    share = batch[:17] if rank == 0 else batch[17:]
    values = evaluate({"quasi_hidden": quasi(view)}, [share], view, distributed=True).as_dict()
    Path(sys.argv[2]).write_text(json.dumps(values))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
