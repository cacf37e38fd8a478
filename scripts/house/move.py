"""Move and join modules as house.py says, and rewrite every import and dotted name of them, in one pass.

A module that is joined to others keeps its text; its docstring becomes the comment at the head of its section.
Names that would clash are renamed as RENAMES says, wherever they are global names of that module.
"""
import ast, re, subprocess, sys, textwrap
from pathlib import Path
sys.path.insert(0, str(Path(__file__).parent))
from house import HOUSE
from renames import RENAMES, PACKAGES, DOCS

ROOT = Path(__file__).resolve().parents[2]; PKG = ROOT / 'hago'
mods = {'.'.join(p.relative_to(PKG).with_suffix('').parts): p for p in PKG.rglob('*.py')}
NEW = {old: new for new, olds in HOUSE.items() for old in olds}
MODULES = {f'hago.{o}': f'hago.{n}' for o, n in NEW.items()}
problems = []

def bound(target):
    if isinstance(target, ast.Name): yield target.id
    elif isinstance(target, (ast.Tuple, ast.List)):
        for e in target.elts: yield from bound(e)
    elif isinstance(target, ast.Starred): yield from bound(target.value)

def origin(module, name):
    """What `from module import name` gives: (new module, new name), or (new package, leaf) of a module."""
    full = f'{module}.{name}'
    if full in MODULES:
        pkg, _, leaf = MODULES[full].rpartition('.')
        return pkg, leaf
    if module in MODULES:
        return MODULES[module], RENAMES.get((module.removeprefix('hago.'), name), name)
    return module, name

def defs(tree, module):
    out = {}
    for n in tree.body:
        if isinstance(n, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)): out[n.name] = (module, n.name)
        elif isinstance(n, ast.Assign):
            for t in n.targets:
                for b in bound(t): out[b] = (module, b)
        elif isinstance(n, ast.AnnAssign):
            for b in bound(n.target): out[b] = (module, b)
        elif isinstance(n, ast.ImportFrom) and n.module != '__future__':
            for a in n.names: out[a.asname or a.name] = ('import', origin(n.module, a.name))
        elif isinstance(n, ast.Import):
            for a in n.names: out[a.asname or a.name.split('.')[0]] = ('import', (a.name, None))
    return out

def global_uses(tree, wanted):
    """Positions of Name nodes that mean a global name, and of its definition."""
    hits = []
    def locals_of(fn):
        names, glob = set(), set()
        args = fn.args
        for a in [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]:
            if a: names.add(a.arg)
        body = fn.body if isinstance(fn.body, list) else [fn.body]
        def scan(node):
            for c in ast.iter_child_nodes(node):
                if isinstance(c, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    names.add(c.name); continue
                if isinstance(c, (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
                    for w in ast.walk(c):
                        if isinstance(w, ast.NamedExpr): names.add(w.target.id)
                    continue
                if isinstance(c, ast.Name) and isinstance(c.ctx, (ast.Store, ast.Del)): names.add(c.id)
                if isinstance(c, (ast.Import, ast.ImportFrom)):
                    for a in c.names: names.add(a.asname or a.name.split('.')[0])
                if isinstance(c, ast.ExceptHandler) and c.name: names.add(c.name)
                if isinstance(c, (ast.MatchAs, ast.MatchStar)) and c.name: names.add(c.name)
                if isinstance(c, ast.Global): glob.update(c.names)
                scan(c)
        for b in body:
            holder = ast.Module(body=[b], type_ignores=[]) if isinstance(b, ast.stmt) else ast.Expr(b)
            scan(holder)
        return names - glob
    def visit(node, shadow):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            args = node.args
            for d in [*args.defaults, *[k for k in args.kw_defaults if k], *getattr(node, 'decorator_list', [])]: visit(d, shadow)
            for a in [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]:
                if a and a.annotation: visit(a.annotation, shadow)
            if getattr(node, 'returns', None): visit(node.returns, shadow)
            inner = shadow | locals_of(node)
            for b in (node.body if isinstance(node.body, list) else [node.body]): visit(b, inner)
            return
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            names = {b for g in node.generators for b in bound(g.target)}
            visit(node.generators[0].iter, shadow)
            inner = shadow | names
            for c in ast.iter_child_nodes(node):
                if isinstance(c, ast.comprehension):
                    if c is not node.generators[0]: visit(c.iter, inner)
                    for i in c.ifs: visit(i, inner)
                else: visit(c, inner)
            return
        if isinstance(node, ast.ClassDef):
            for d in [*node.decorator_list, *node.bases, *[k.value for k in node.keywords]]: visit(d, shadow)
            own = {b for n in node.body if isinstance(n, (ast.Assign, ast.AnnAssign)) for t in (n.targets if isinstance(n, ast.Assign) else [n.target]) for b in bound(t)}
            for b in node.body:
                visit(b, shadow | own if isinstance(b, (ast.Assign, ast.AnnAssign)) else shadow)
            return
        if isinstance(node, ast.Name) and node.id in wanted and node.id not in shadow:
            hits.append((node.lineno, node.col_offset, node.id))
        for c in ast.iter_child_nodes(node): visit(c, shadow)
    for n in tree.body:
        if isinstance(n, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)) and n.name in wanted:
            hits.append((n.lineno, None, n.name))
        visit(n, frozenset())
    return hits

def rename_globals(text, names):
    """The text with global names replaced; `names` maps old to new."""
    if not names: return text
    tree = ast.parse(text); lines = text.split('\n'); edits = []
    for line, col, name in global_uses(tree, names):
        if col is None:
            m = re.search(rf'\b(def|class)\s+({re.escape(name)})\b', lines[line - 1]); col = m.start(2)
        else:
            col = len(lines[line - 1].encode()[:col].decode())
        edits.append((line, col, name))
    for line, col, name in sorted(set(edits), reverse=True):
        l = lines[line - 1]; assert l[col:col + len(name)] == name, (line, col, name, l)
        lines[line - 1] = l[:col] + names[name] + l[col + len(name):]
    return '\n'.join(lines)

DOTTED = re.compile(r'\bhago((?:\.\w+)+)')
PATHS = re.compile(r'\bhago/((?:\w+/)*\w+)\.py\b')
def dotted(m):
    parts = m[1][1:].split('.')
    for k in range(len(parts), 0, -1):
        head = '.'.join(parts[:k])
        if head == 'replay' and k == len(parts): break
        if head in NEW:
            rest = parts[k:]
            if rest: rest[0] = RENAMES.get((head, rest[0]), rest[0])
            return '.'.join(['hago', NEW[head], *rest])
        if head in PACKAGES: return '.'.join(['hago', PACKAGES[head], *parts[k:]])
    return m[0]
def path(m):
    head = m[1].replace('/', '.')
    return f"hago/{NEW[head].replace('.', '/')}.py" if head in NEW else m[0]
def plain(text): return PATHS.sub(path, DOTTED.sub(dotted, text))

def spell(module, names):
    """An import statement of (name, asname) pairs."""
    return f"from {module} import {', '.join(n if a in (None, n) else f'{n} as {a}' for n, a in names)}"

def rewrite_from(node, here=None, renamed={}):
    """The statements that stand for one `from ... import`; without what `here` defines itself."""
    groups = {}
    for a in node.names:
        module, name = origin(node.module, a.name)
        if module == here:
            continue
        groups.setdefault(module, []).append((name, a.asname or renamed.get(a.name, a.name)))
    return [spell(m, names) for m, names in groups.items()]

def with_new_names(text):
    tree = ast.parse(text); names = {}
    for n in tree.body:
        if isinstance(n, ast.ImportFrom) and n.module and n.module.startswith('hago'):
            for a in n.names:
                new = RENAMES.get((n.module.removeprefix('hago.'), a.name))
                if new and a.asname is None: names[a.name] = new
    return rename_globals(text, names), names

def rewrite(text, here=None, drop_top=False):
    """The text with imports and dotted names rewritten; with drop_top its top-level imports are returned apart."""
    text, renamed = with_new_names(text)
    tree = ast.parse(text); lines = text.split('\n'); edits, tops = [], []
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Import, ast.ImportFrom)): continue
        top = node in tree.body
        src = '\n'.join(lines[node.lineno - 1:node.end_lineno])
        comment = re.search(r'#.*$', src, re.M)
        if isinstance(node, ast.ImportFrom) and (node.module or '').split('.')[0] == 'hago':
            out = rewrite_from(node, here, renamed if top else {})
            if comment: out = [o + '  ' + comment[0] for o in out]
        else:
            out = [plain(src.strip())]
        if top and drop_top:
            tops += out; edits.append((node.lineno, node.end_lineno, None))
        else:
            ind = re.match(r'\s*', lines[node.lineno - 1])[0]
            edits.append((node.lineno, node.end_lineno, [ind + o for o in out] or ([ind + 'pass'] if not top else [])))
    out, at = [], 1
    for a, b, new in sorted(edits, key=lambda e: e[:2]):
        out.append(plain('\n'.join(lines[at - 1:a - 1]))) if a > at else None
        if new: out.append('\n'.join(new))
        at = b + 1
    out.append(plain('\n'.join(lines[at - 1:])))
    return '\n'.join(o for o in out if o is not None), tops

def docstring_cut(text):
    tree = ast.parse(text); d = tree.body[0]
    assert isinstance(d, ast.Expr) and isinstance(d.value.value, str)
    lines = text.split('\n')
    return ast.get_docstring(tree), '\n'.join(lines[d.end_lineno:])

def build(new, olds):
    here = f'hago.{new}'
    seen, texts, drops, statements = {}, {}, {}, {}
    for old in olds:
        text = mods[old].read_text(); tree = ast.parse(text)
        for n in tree.body:
            names_of = [n.name] if hasattr(n, 'name') else [b for x in getattr(n, 'targets', [getattr(n, 'target', None)]) if x is not None for b in bound(x)]
            for b in names_of: statements[old, b] = n
        names = {k[1]: v for k, v in RENAMES.items() if k[0] == old}
        # what another part of this module defines and this one imports under another name
        for n in tree.body:
            if isinstance(n, ast.ImportFrom) and n.module and n.module.startswith('hago'):
                for a in n.names:
                    module, name = origin(n.module, a.name)
                    if module == here and (a.asname or a.name) != name: names[a.asname or a.name] = name
                    if f'{n.module}.{a.name}' in MODULES and MODULES[f'{n.module}.{a.name}'] == here:
                        problems.append(f'{new}: {old} imports the module {a.name} that it is joined to')
        text = rename_globals(text, names)
        texts[old] = text
        for name, what in defs(ast.parse(mods[old].read_text()), old).items():
            if what[0] == 'import' and what[1][0] == here: continue
            final = names.get(name, name)
            key = what if what[0] == 'import' else (old, name)
            if final in seen and (old, name) in statements and seen[final][1] in statements and ast.dump(statements[old, name]) == ast.dump(statements[seen[final][1]]):
                n = statements[old, name]; drops.setdefault(old, []).append((n.lineno, n.end_lineno)); continue
            if final in seen and seen[final][1] != key:
                problems.append(f'{new}: {final!r} of {old} ({key}) and of {seen[final][0]} ({seen[final][1]})')
            seen.setdefault(final, (old, key))
    imports, bodies, doc = [], [], None
    for old, spans in drops.items():
        lines = texts[old].split('\n')
        for a, b in sorted(spans, reverse=True): del lines[a - 1:b]
        texts[old] = '\n'.join(lines)
    for old in olds:
        text, tops = rewrite(texts[old], here, drop_top=True)
        imports += tops
        d, body = docstring_cut(text)
        if doc is None: doc = d; head = ''
        else:
            wrapped = '\n'.join('\n'.join(textwrap.wrap(par, 116)) for par in d.split('\n\n')).split('\n')
            head = '# ' + '-' * 64 + ' ' + old.rpartition('.')[2].lstrip('_').replace('_', ' ') + '\n' + '\n'.join('# ' + w for w in wrapped) + '\n\n'
        bodies.append(head + body.strip() + '\n')
    doc = DOCS.get(new, doc)
    imports = [i for i in dict.fromkeys(imports) if '__future__' not in i]
    quote = '"""' + doc + ('\n"""' if '\n' in doc else '"""')
    return quote + '\n\nfrom __future__ import annotations\n\n' + '\n'.join(imports) + '\n\n\n' + '\n\n'.join(bodies)

def git(*a): subprocess.run(['git', '-C', str(ROOT), *a], check=True, stdout=subprocess.DEVNULL)

def main(dry):
    made = {new: build(new, olds) for new, olds in HOUSE.items()}
    for p in sorted(set(problems)): print(p)
    if dry or problems: return
    others = {p: rewrite(p.read_text())[0] for p in [*[p for m, p in mods.items() if m not in NEW], *ROOT.glob('tests/**/*.py'), *ROOT.glob('scripts/**/*.py'), *ROOT.glob('docs/*.py')]}
    prose = {p: plain(p.read_text()) for p in [*ROOT.glob('*.md'), *ROOT.glob('docs/*.md'), ROOT / 'scripts/test', ROOT / 'scripts/venv'] if p.name != 'CHANGELOG.md'}
    temp = {}
    for new, olds in HOUSE.items():
        t = PKG / ('__moving__' + new.replace('.', '__') + '.py'); git('mv', str(mods[olds[0]]), str(t)); temp[new] = t
        for o in olds[1:]: git('rm', '-q', str(mods[o]))
    for new, t in temp.items():
        target = PKG / (new.replace('.', '/') + '.py'); target.parent.mkdir(parents=True, exist_ok=True)
        git('mv', str(t), str(target)); target.write_text(made[new])
    for p, text in {**others, **prose}.items(): p.write_text(text)
main('--dry' in sys.argv)
