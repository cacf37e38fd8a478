import subprocess, re
from pathlib import Path
R=Path(__file__).resolve().parents[2]; P=R/'hago'
def git(*a): subprocess.run(['git','-C',str(R),*a],check=True,stdout=subprocess.DEVNULL)
INIT={
 'serialization':'Checked JSON, tensor files, tables of text and schemas: nothing that a file says is ever executed.',
 'arithmetic':'Exact integer arithmetic: dtypes, schemes, scales, multipliers, rounding, requantization, packing.',
 'emulation':'The arithmetic and the quantizers of other systems, bit for bit, on tensors; one module or package a system.',
 'emulation/tpu_mlir':"TPU-MLIR: its integer operators, calibration, tables and fake quantization, as its compiler computes them.",
 'emulation/tensorflow':"TensorFlow: its fake quantization, its training layers, and contrib.quantize's rewriting of graphs.",
 'ops/forms':'How other engines compute an operator: forms of the operators next door, named by hardware files.',
 'data':'Data sets: batches from any iterable or file, checked once, read often, within a memory bound.',
 'graph':'The network: nodes and edges, import from torch.export, passes over it, running it in float.',
 'graph/passes':'Passes from Graph to Graph, one file each.',
 'hardware':'What a chip can do, as a file: load it, check it, list it.',
 'calibration':'From data to thresholds: statistics of one streaming pass, and the estimators that read them.',
 'plan':'From bits to integers: topology, search space, scales, bounds, the Plan, and the Strategy that is stored.',
 'simulation':'The Plan on float carriers, and the values that a trial need not compute again.',
 'runtime':'The Plan as an integer model: the reference, the native engine, stored models, and what equal means.',
 'runtime/native':'The integer model on the fastest kernels that are exact on this machine.',
 'cost':'What a Plan takes on its hardware: bytes, cycles, latency, energy.',
 'export':'Strategies and integer models as files for other engines.',
 'export/onnx':'ONNX files, in QDQ and in QOperator form, and their check in the engines that run them.',
 'study':'The search loop, which knows no Plan: trials, log, budget, resume, and the protocol of a searcher.',
 'searchers':'The search algorithms, which are asked for points and told their scores.',
 'search':'One search of one model on one chip: prepare, measure sensitivities, refine thresholds, evaluate, replay.',
 'qat':'Training with the Plan in the forward pass: fake quantization, ranges, schemes, finetuning.',
 'analysis':'Looking: inspect, explain, compare, report, and time the figures of a hardware file on this machine.',
}
for k,v in INIT.items():
    f=P/k/'__init__.py'; f.parent.mkdir(parents=True,exist_ok=True); f.write_text(f'"""{v}"""\n')
(P/'serialization').mkdir(exist_ok=True)
git('mv',str(P/'schemas'),str(P/'serialization/schemas'))
(P/'runtime/native').mkdir(parents=True,exist_ok=True)
git('mv',str(P/'engine/native'),str(P/'runtime/native/cpp'))
def sub(path,*pairs):
    p=R/path; t=p.read_text()
    for a,b in pairs:
        assert a in t,(path,a); t=t.replace(a,b)
    p.write_text(t)
sub('hago/serialization/json_text.py',('(files("hago") / "schemas" /','(files("hago.serialization") / "schemas" /'))
sub('hago/hardware/check.py',('(resources.files("hago") / "schemas" /','(resources.files("hago.serialization") / "schemas" /'))
sub('hago/hardware/file.py',('Path(__file__).resolve().parent.parent / "hardware_specs"','Path(__file__).resolve().parents[2] / "hardware_specs"'))
sub('hago/runtime/native/library.py',('Path(__file__).parent / "native"','Path(__file__).parent / "cpp"'))
for f in R.glob('hardware_specs/*.json'): f.write_text(f.read_text().replace('../hago/schemas/','../hago/serialization/schemas/'))
for old in ('calibrate','debug','engine','frontend','measuring','searching','training','trials','schemas'):
    d=P/old
    if d.exists():
        for f in d.rglob('*'):
            if f.is_file() and '__pycache__' not in str(f): print('left', f); 
        subprocess.run(['git','-C',str(R),'rm','-rqf','--ignore-unmatch',str(d)],check=False)
        subprocess.run(['rm','-rf',str(d)])
pk=sorted('.'.join(p.parent.relative_to(R).parts) for p in P.rglob('__init__.py'))
pk+=['hago.hardware_specs','hago.serialization.schemas']
t=(R/'setup.cfg').read_text()
a=t.index('packages =\n'); b=t.index('package_dir')
t=t[:a]+'packages =\n'+''.join(f'    {p}\n' for p in sorted(pk))+t[b:]
t=t.replace('hago.engine = native/*','hago.runtime.native = cpp/*').replace('hago.schemas = *.json','hago.serialization.schemas = *.json')
(R/'setup.cfg').write_text(t)

sub('hago/ops/__init__.py',('for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))','for m in pkgutil.iter_modules(__path__) if not m.ispkg and m.name[0] != "_")'))
sub('hago/arithmetic/numerics.py',("""    Where pairs of products are cut first (`hago.plan.accumulators`), the register that takes them wraps. Where every addition
    saturates (`hago.plan.accumulators`), the sum of two values is clamped once.
""","""    Where pairs of products are cut first, the register that takes them wraps; where every addition saturates, the sum
    of two values is clamped once (both: `hago.plan.accumulators`).
"""))
