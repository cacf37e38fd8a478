"""What `--help` says besides the options themselves."""

from __future__ import annotations

from typing import Final

NAMED: Final = """
A model is named package.module:callable; the callable takes no arguments and returns an nn.Module. Modules
in the current folder can be imported. Data is an .npz file (arrays called as the model's inputs, or one
array; labels as y or labels), a folder of images (a subfolder per class, or none), or
package.module:callable that returns an iterable of batches."""

EXIT: Final = """
exit codes: 0 done; 1 done, and the answer is no (the replay differs, the check fails, the integer model is
not the simulated one); 2 bad input; 70 a defect of hago; 130 interrupted"""

TOP: Final = f"""
start with:
  hago demo                                  all of it on handwritten digits, in less than a minute
  hago hardware list                         what can be searched for
  hago explain zoo:net --hardware vta --input-shape 3,32,32
  hago search zoo:net --hardware vta --data calibration.npz
{NAMED}
{EXIT}"""

EXAMPLES: Final = {
    "search": """
examples:
  hago search zoo:net --weights net.safetensors --hardware x86_vnni --data calibration.npz
  hago search zoo:net --hardware my_chip.json --data images/ --size 224 --budget 10m --held-out test.npz
  hago search zoo:net --hardware vta --data data:calibration --keep-float 'head.*' --fix-bits 'conv1:1=8'
  hago search zoo:net --hardware vta --data calibration.npz --minimize weight_bytes --keep 'agreement >= 99 %'
  hago search zoo:net --hardware vta --data calibration.npz --maximize sqnr --budget-cost 'weight_bytes <= 4 MB'
  hago search zoo:net --hardware x86_vnni --data calibration.npz --finetune budget=5m

Ctrl-C ends the search with what it has found; the same command continues it. So does the same command
with a larger --budget.""",
    "quantize": """
example:
  hago quantize zoo:net --hardware arm_dot --data calibration.npz --estimator percentile:99.9
  hago quantize zoo:net --hardware arm_dot --data calibration.npz --calibration-table net_cali_table""",
    "explain": """
examples:
  hago explain zoo:net --hardware int16_accumulator --input-shape 3,32,32
  hago explain zoo:net --hardware x86_vnni --input-shape 3,32,32 --cost
  hago explain zoo:encoder --hardware x86_vnni --input-shape 32:int64 --input-shape 32:int64""",
    "sensitivity": """
example:
  hago sensitivity zoo:net --hardware vta --data calibration.npz --save sensitivity.json

The most sensitive edges come first. A search can be guided by this: --searcher sensitivity""",
    "finetune": """
example:
  hago finetune zoo:net strategies/net-vta.json --data calibration.npz --budget 5m --held-out test.npz

The float model's outputs are what is trained for, so data needs no labels. Killed at any moment, the same
command continues from its checkpoint.""",
    "simulate": """
example:
  hago simulate zoo:net strategies/net-vta.json --data test.npz""",
    "realize": """
example:
  hago realize zoo:net strategies/net-vta.json --data test.npz --samples 256 --json
  hago realize zoo:net strategies/net-vta.json --data test.npz --save net.safetensors
  hago realize zoo:net strategies/net-x86_vnni.json --data test.npz --explain

Exit code 1 says that a value differs; that would be a defect of hago.""",
    "cost": """
example:
  hago cost zoo:net strategies/net-vta.json --batch 32

What a hardware file gives no figure for is left out and named; docs/cost.md says how the rest adds up.""",
    "run": """
example:
  hago run net.safetensors --data test.npz --save outputs.npz

Every output is compared with the simulation of the stored plan; exit code 1 says that one differs.""",
    "inspect": """
example:
  hago inspect zoo:net strategies/net-vta.json --data test.npz --samples 128 --csv layers.csv""",
    "replay": """
examples:
  hago replay zoo:net logs/net-vta.jsonl --data calibration.npz
  hago replay zoo:net strategies/net-vta.json --data calibration.npz

Exit code 1 says that a figure differs in its last bit or more.""",
    "compare": """
examples:
  hago compare zoo:net strategies/net-onnxruntime_cpu.json --data test.npz --samples 64
  hago compare zoo:net strategies/net-x86_vnni.json --data test.npz --realizations fast,onnxruntime --json

Exit code 1 says that the simulator or the fast engine differs from the reference; that would be a defect of hago.""",
    "export": """
examples:
  hago export zoo:net strategies/net-x86_vnni.json --format tpu-mlir --data calibration.npz
  hago export zoo:net strategies/net-onnxruntime_cpu.json --format onnx --check --data calibration.npz

With --check, exit code 1 says that the engine's integers are not ours: a difference of more than one quantum,
or of more than one value in 10,000 of a node.""",
    "hardware": """
examples:
  hago hardware list
  hago hardware show x86_vnni
  hago hardware check my_chip.json
  hago hardware measure x86_vnni --output this_machine.json

Exit code 1 says that a file is wrong; every mistake is listed with its place.""",
    "demo": """
The demo leaves its model, data, logs and strategies behind, to try the other commands on, e.g.
  hago inspect hago.demo:DigitNet strategies/demo-x86_vnni.json --weights demo/weights.pt --data demo/test.npz""",
}


ON_STRATEGY: Final = "MODEL STRATEGY --data DATA"
USAGE: Final = {
    "search": "MODEL --hardware NAME|FILE --data DATA",
    "quantize": "MODEL --hardware NAME|FILE --data DATA",
    "explain": "MODEL --hardware NAME|FILE (--data DATA | --input-shape SHAPE)",
    "cost": "MODEL STRATEGY",
    "sensitivity": "MODEL --hardware NAME|FILE --data DATA",
    "simulate": ON_STRATEGY,
    "realize": ON_STRATEGY,
    "run": "FILE --data DATA",
    "inspect": ON_STRATEGY,
    "compare": ON_STRATEGY,
    "finetune": ON_STRATEGY,
    "export": "(MODEL STRATEGY | FILE) --format NAME",
    "replay": "MODEL LOG|STRATEGY --data DATA",
}
