"""Compare Pareto search with peers that also search, on one network: fronts on held-out images, and time.

Each peer is installed into an environment of its own, a folder below --environments, which is used again if it exists.
It runs there in a process of its own, with the same threads and the same calibration images, and its own simulation or
engine computes the outputs that are compared. hago runs in a process of its own, too. The processes run one after the
other. Installing, importing and measuring on held-out images do not count as time. For each peer the table also says
after how many seconds the front of hago had as much hypervolume as the peer's, and the peer was not above it at
budgets of 4, 5, 6, 7 and 8 bits a weight; and after how many seconds no point of the peer at all lay above it. Each of
--searchers, with each of --efforts, is compared with all peers.

Bytes of weights are counted alike: elements times their bits, and 4 bytes for every bias. hago runs on the hardware
file --hardware; peers may choose 8 bits for activations and fewer for weights; layers may stay float on both sides.

    python scripts/benchmark_peers.py --assets DIR --environments DIR --out DIR
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _assets import Asset, load, outputs
from _fronts import Point, Row, as_good_after, at_budgets, compared, front, listed, plot
from _peer_processes import AIMET, MODELOPT, NNCF, Peer, run_peer, run_script
from torch import Tensor, nn

#: Bits of all weights whose bytes are the budgets at which fronts are compared.
BUDGETS = (4.0, 5.0, 6.0, 7.0, 8.0)
PEERS = (
    Peer("modelopt_gradient", "modelopt", MODELOPT, "_peer_modelopt.py", ("gradient",)),
    Peer("modelopt_kl", "modelopt", MODELOPT, "_peer_modelopt.py", ("kl_div",)),
    Peer("nncf", "nncf", NNCF, "_peer_nncf.py", ("accuracy_control",)),
    Peer("aimet_amp", "aimet", AIMET, "_peer_aimet.py", ("mixed_precision",)),
)


def main() -> None:
    """Run hago and all peers, compare them, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", required=True, help="the folder of pretrained networks")
    parser.add_argument("--environments", type=Path, required=True, help="where peers are, or will be, installed")
    parser.add_argument("--net", default="cifar_resnet20")
    parser.add_argument("--hardware", default="x86_vnni")
    parser.add_argument("--searchers", nargs="+", default=["pareto", "pareto:points=16,rounds=1"], help="of hago")
    parser.add_argument("--efforts", nargs="+", default=["good"], help="of hago")
    parser.add_argument("--images", type=int, default=256, help="to calibrate and search on")
    parser.add_argument("--held-out", type=int, default=2000, help="to compare on")
    parser.add_argument("--peers", default=",".join(p.name for p in PEERS), help="which, with commas between")
    parser.add_argument("--skip", default="", help="which not, with commas between")
    parser.add_argument("--runs", type=int, default=3, help="of hago, of which the median time counts")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, help="a folder for results.json, the table and the plot")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    contest = Contest(options)
    for searcher, effort in itertools.product(options.searchers, options.efforts):
        contest.mine(searcher, effort)
    skipped = options.skip.split(",")
    for peer in PEERS:
        if peer.name in options.peers.split(","):
            said = "--skip" if peer.name in skipped else contest.theirs(peer)
            if said:
                print(f"{peer.name}: skipped: {said}", flush=True)
    contest.report()


class Contest:
    """One network, its data, and the fronts so far."""

    def __init__(self, options: Any) -> None:
        self.options = options
        self.asset: Asset = load(options.assets, options.net, options.images, options.held_out)
        self.reference = outputs(self.asset.module, self.asset.test)
        self.fronts: dict[str, list[Point]] = {}
        self.seconds: dict[str, float] = {}
        self.bits: dict[str, list[Row]] = {}

    def point(self, found: Tensor, cost: float, label: str, seconds: float) -> Point:
        """The point of a model, from its outputs on the held-out images."""
        reference = self.reference.double().flatten(1)
        noise = (found.double().flatten(1) - reference).square().sum(1)
        labels = self.asset.labels
        right = None if labels is None else (found.argmax(1) == labels).double()
        return Point(cost, reference.square().sum(1), noise, right, label, seconds)

    def mine(self, searcher: str, effort: str) -> None:
        """Search with hago, in a process of its own."""
        name, runs = f"hago {searcher} {effort}", []
        for _ in range(self.options.runs):
            with tempfile.TemporaryDirectory() as folder:
                told = (self.options.hardware, searcher, effort)
                data = (Path(folder), self.asset, self.options.assets, self.options.threads)
                said = run_script(sys.executable, "_peer_hago.py", *data, told)
                if said:
                    raise SystemExit(said)
                runs.append(self._read(name, Path(folder)))
        self.seconds[name] = float(np.median(runs))

    def theirs(self, peer: Peer) -> str:
        """Install and run a peer; returns the reason if that failed, else an empty string."""
        with tempfile.TemporaryDirectory() as folder:
            options = self.options
            said = run_peer(peer, options.environments, Path(folder), self.asset, options.assets, options.threads)
            if not said:
                self.seconds[peer.name] = self._read(peer.name, Path(folder))
        return said

    def _read(self, name: str, folder: Path) -> float:
        """Read the points of a process; returns the seconds of its search."""
        found = json.loads((folder / "points.json").read_text())
        self.fronts[name], self.bits[name] = [], found["points"]
        for row in found["points"]:
            out = torch.from_numpy(np.load(folder / row["outputs"]))
            cost = weight_bytes(self.asset.module, row["weights"])
            self.fronts[name].append(self.point(out, cost, row["label"], row["seconds"]))
        print(f"{name}: {len(found['points'])} points in {found['seconds']:.1f} s", flush=True)
        return float(found["seconds"])

    def report(self) -> None:
        """Print and write the results."""
        options = self.options
        # volumes end at the bytes of 8 bits everywhere, where every front has its best point
        budgets = self.budgets()
        widest = budgets[-1]
        head = (
            f"{options.net} on {options.hardware}, {options.images} images to search on, {self.asset.samples} held out"
        )
        print(f"\n{head}, {options.threads} threads; volumes up to {widest:.0f} B of weights")
        tables = [self._beside(name, budgets) for name in self.fronts if name.startswith("hago ")]
        for rows in tables:
            print(table(rows))
            for row in rows:
                for said in row["above_said"]:
                    print(f"  above: {row['front']}, {said}")
        for row in listed({n: front(p) for n, p in self.fronts.items()}):
            low, high = row["interval"]
            print(
                f"  {row['front']:18} {row['bytes']:9.0f} B {row['sqnr']:6.2f} dB [{low:.2f}, {high:.2f}] {row['top1']}"
            )
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            found = {"options": {k: str(v) for k, v in vars(options).items()}, "tables": tables}
            whole = found | {"points": listed(self.fronts), "bits": self.bits}
            (options.out / "peers.json").write_text(json.dumps(whole, indent=1))
            (options.out / "peers.md").write_text("\n\n".join([f"{head}.", *map(table, tables)]) + "\n")
            print(plot(self.fronts, options.out / "peers.png", head))

    def budgets(self) -> list[float]:
        """The bytes of the network with each of BUDGETS bits everywhere."""
        count = len(layers(self.asset.module))
        return [weight_bytes(self.asset.module, [bits] * count) for bits in BUDGETS]

    def _beside(self, own: str, budgets: Sequence[float]) -> list[Row]:
        """The rows of a table: one search of hago, and every peer compared with it."""
        widest = budgets[-1]
        others = [name for name in self.fronts if not name.startswith("hago ")]
        rows = compared({name: self.fronts[name] for name in (own, *others)}, own, widest)
        for row in rows:
            theirs = self.fronts[row["front"]]
            row["seconds"] = self.seconds[row["front"]]
            row["as_good_after"] = as_good_after(self.fronts[own], theirs, widest, at_budgets(theirs, budgets))
            row["none_above_after"] = as_good_after(self.fronts[own], theirs, widest, theirs)
            row["best_top1"] = max((p.top1 or 0.0) for p in theirs)
        return rows


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    titles = (
        "| front | points | seconds | ours as good after | none above after | hypervolume | above (SQNR) | (top-1) | "
        "best top-1 |"
    )
    lines = [
        f"| {r['front']} | {r['points']} | {r['seconds']:.1f} | {r['as_good_after']:.1f} | "
        f"{r['none_above_after']:.1f} | {r['hypervolume']:.3f} | {r['above']} | {r['top1_above']} | "
        f"{r['best_top1']:.4f} |"
        for r in rows
    ]
    return "\n".join([titles, "|" + "---|" * 9, *lines])


def layers(module: nn.Module) -> list[nn.Module]:
    """The layers with weights, in order."""
    return [m for m in module.modules() if isinstance(m, (nn.Conv1d, nn.Conv2d, nn.Linear))]


def weight_bytes(module: nn.Module, bits: Any) -> float:
    """The bytes of the weights of all layers, and of a bias of 4 bytes for every output channel.

    Every layer has a bias, because batch norms are folded into it.

    Args:
        bits: of each layer in order, as a sequence or by name.

    Raises:
        SystemExit: another number of layers than the network has.
    """
    found = list(bits.values()) if isinstance(bits, dict) else list(bits)
    if len(found) != len(layers(module)):
        raise SystemExit(f"got bits of {len(found)} layers; the network has {len(layers(module))}")
    pairs = zip(layers(module), found, strict=True)
    return sum(-(-m.weight.numel() * b // 8) + 4 * len(m.weight) for m, b in pairs)


if __name__ == "__main__":
    main()
