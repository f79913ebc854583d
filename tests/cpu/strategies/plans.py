"""Plans of toy flows, and which launches of a plan may run side by side."""

from dynaflow.context import Context
from dynaflow.memory import place
from dynaflow.planner import plan
from dynaflow.sync import synchronise
from dynaflow.testing.notation import flow_of
from dynaflow.verify import verify
from tests.cpu.happens_before import happens_before


def make(flow, strategy, batch_size=64, costs=None, **tags):
    """A verified plan."""
    facts = {"batch_size": batch_size, "device": "cpu", **{f"tag.{name}": value for name, value in tags.items()}}
    made = place(flow, synchronise(flow, plan(flow, strategy, Context(facts), costs=costs)))
    verify(made, flow)
    return made


def labels(made, stream=None):
    return [launch.label for launch in made.launches if stream in (None, launch.stream)]


def beside(made):
    """Pairs of labels that no wait and no stream orders, both ways round."""
    names, ordered = labels(made), happens_before(made)
    pairs = [(i, j) for i in range(len(names)) for j in range(len(names)) if i != j and (i, j) not in ordered and (j, i) not in ordered]
    return {(names[i], names[j]) for i, j in pairs}


def layers(num_layers, text, **names):
    """`text` per layer, {i}: its number, {x}: what it takes, {y}: what it makes."""
    lines = ["input x0"] + [text.format(i=i, x=f"x{i}", y=f"x{i + 1}") for i in range(num_layers)]
    return flow_of("\n".join([*lines, f"output x{num_layers}"]))


def moe(num_layers=2, marks=""):
    """attn, dispatch, experts, combine; shared experts beside them."""
    return layers(num_layers, f"""
        L{{i}}.attn: {{x}} -> h{{i}}
        L{{i}}.dispatch network group:ep {marks}: h{{i}} -> d{{i}}
        L{{i}}.experts: d{{i}} -> e{{i}}
        L{{i}}.combine network group:ep {marks}: e{{i}} -> c{{i}}
        L{{i}}.shared: h{{i}} -> s{{i}}
        L{{i}}.add memory: c{{i}} s{{i}} -> {{y}}""")  # fmt: skip


def dense(num_layers=2):
    """Tensor parallel: qkv, attention, o, all-reduce, mlp, all-reduce."""
    return layers(num_layers, """
        L{i}.qkv: {x} -> q{i}
        L{i}.attn: q{i} -> a{i}
        L{i}.o: a{i} -> o{i}
        L{i}.ar network group:tp: o{i} -> r{i}
        L{i}.mlp: r{i} -> m{i}
        L{i}.ar2 network group:tp: m{i} -> {y}""")  # fmt: skip


def fsdp(num_layers=6):
    """A weight is gathered for every layer."""
    gathers = "\n".join(f"param w{i} state\nL{i}.gather network group:dp whole: w{i} -> W{i}^\nL{i}.mm: x{i} W{i} -> x{i + 1}"
                        for i in range(num_layers))  # fmt: skip
    return flow_of(f"input x0\n{gathers}\noutput x{num_layers}")


def chain():
    """Nothing runs beside anything, and nothing is sent."""
    return flow_of("input x\na: x -> y\nb: y -> z\noutput z")
