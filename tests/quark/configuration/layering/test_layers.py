"""quark.Layers: the layers that take part, their order, and the command line of a script."""

import argparse

import pytest

import quark
from quark import LayeredConfig, Layers, SchemaValidationError


def make_layers():
    """The layers of the design: defaults, a named one that comes after them, a lazy one."""
    layers = Layers()

    @layers.add(default=True)
    def defaults(c):
        c.lr = 0.001
        c.batch_size = 32

    @layers.add(priority=1, after="defaults")
    def high_lr(c):
        c.lr = 0.01

    @layers.add(priority=2)
    def higher_lr(c):
        c.lr = 0.1

    @layers.add(lazy=True)
    def scaled(c):
        c.lr *= c.batch_size / 32

    return layers


def write(layers, name, values, log=None, **options):
    """Add a layer that writes these values, and says so in a log."""

    def apply(c):
        c.update(values)
        if log is not None:
            log.append(name)

    layers.add(name=name, **options)(apply)


@pytest.mark.parametrize(
    ("argv", "lr"),
    [
        ([], 0.001),
        (["high_lr"], 0.01),
        (["higher_lr", "high_lr"], 0.1),  # by priority, whatever the order of words
        (["high_lr", "batch_size=64"], 0.02),  # lazy layers see the command line
        (["high_lr", "lr=1"], 1.0),
    ],
)
def test_layers_are_applied_by_kind_and_priority(argv, lr):
    assert make_layers().resolve(argv).lr == pytest.approx(lr)


def test_the_order_is_defaults_named_files_environment_command_line_lazy(tmp_path):
    (tmp_path / "file.json").write_text('{"a": "file", "b": "file", "c": "file", "d": "file"}')
    layers = Layers()
    write(layers, "late", {"a": "lazy"}, lazy=True)
    layers.add_environment("TRAIN_")
    layers.add_file(tmp_path / "file.json")
    write(layers, "named", dict.fromkeys("abcde", "named"))
    write(layers, "base", dict.fromkeys("abcdef", "default"), default=True)
    environ = {"TRAIN_A": "env", "TRAIN_B": "env", "TRAIN_C": "env", "OTHER": "1"}
    config = layers.resolve(["named", "a=line", "b=line"], environ=environ)
    assert config == {
        "a": "lazy", "b": "line", "c": "env", "d": "file", "e": "named", "f": "default",
    }  # fmt: skip


def test_a_layer_brings_those_that_it_comes_after_and_they_go_first():
    layers, log = Layers(), []
    write(layers, "nodes", {"nodes": 4}, log, after=["base_setup", "gpu_setup"], priority=-5)
    write(layers, "gpu_setup", {"gpu": True}, log, priority=9)
    write(layers, "base_setup", {"data_dir": "/data"}, log)
    write(layers, "unasked", {"x": 1}, log)
    config = layers.resolve(["nodes"])
    assert log == ["base_setup", "gpu_setup", "nodes"]
    assert config == {"data_dir": "/data", "gpu": True, "nodes": 4}


def test_what_a_default_layer_needs_is_a_default_too():
    layers, log = Layers(), []
    write(layers, "first", {"x": 1}, log, default=True, after="needed")
    write(layers, "needed", {"x": 2}, log, priority=7)
    write(layers, "second", {"x": 3}, log, default=True, priority=1)
    assert layers.resolve([]).x == 3
    assert log == ["needed", "first", "second"]


def test_a_circle_is_named():
    layers = Layers()
    write(layers, "a", {}, after="b")
    write(layers, "b", {}, after="c")
    write(layers, "c", {}, after="a")
    with pytest.raises(SchemaValidationError, match=r"circular: a -> b -> c -> a"):
        layers.resolve(["a"])


def test_no_layer_comes_after_one_that_is_applied_later(tmp_path):
    layers = Layers()
    layers.add_file(tmp_path / "x.json")
    write(layers, "early", {}, after="x")
    with pytest.raises(SchemaValidationError, match=r"'early'.*cannot come after 'x'.*file layer"):
        layers.resolve(["early"])
    layers = Layers()
    write(layers, "lonely", {}, after="nobdy")
    write(layers, "nobody", {})
    with pytest.raises(SchemaValidationError, match="not a layer; did you mean 'nobody'"):
        layers.resolve(["lonely"])


def test_a_lazy_layer_takes_part_unless_it_is_no_default():
    layers = Layers()
    write(layers, "data", {"dataset": "imagenet"}, default=True)

    @layers.add(lazy=True, default=False)
    def computed(c):
        c.classes = {"imagenet": 1000, "cifar10": 10}[c.dataset]

    assert "classes" not in layers.resolve([])
    assert layers.resolve(["dataset=%cifar10%", "computed"]).classes == 10


def test_a_lazy_block_sees_the_command_line_and_all_else_is_as_it_was():
    layers = Layers()
    calls = []

    @layers.add(default=True)
    def model(c):
        calls.append(c.get("model"))
        c.model = "resnet50"
        c.depth, c.sizes = 50, [64]
        with layers.lazy():
            c.classes = {"imagenet": 1000}[c.dataset]  # not there before the command line
            if c.model == "resnet101":
                c.depth = 101
                c.sizes.append(128)
        c.width = 1

    config = layers.resolve(["model=resnet101", "dataset=imagenet", "width=2"])
    assert config == {
        "model": "resnet101", "depth": 101, "sizes": [64, 128], "width": 2, "classes": 1000,
        "dataset": "imagenet",
    }  # fmt: skip
    assert calls == [None, "resnet101"]
    assert 'command line <- "resnet50" model' in config.why("model")
    assert config.why("depth").startswith("depth = 101  <- model (")
    assert "<- [64] model" in config.why("sizes")


def test_an_error_in_a_lazy_block_comes_out_when_it_counts():
    layers = Layers()

    @layers.add(default=True)
    def model(c):
        with layers.lazy():
            c.classes = {"imagenet": 1000}[c.dataset]

    with pytest.raises(AttributeError, match="no key 'dataset'") as raised:
        layers.resolve([])
    assert any("in the layer 'model'" in note for note in raised.value.__notes__)
    with (
        pytest.raises(SchemaValidationError, match="must be called in a layer's function"),
        layers.lazy(),
    ):
        pass


def test_namespaces_have_keys_priorities_and_words_of_their_own():
    model, data = Layers(), Layers()

    @model.add(default=True)
    def defaults(m):
        m.backbone, m.lr = "resnet50", 0.1

    @data.add(default=True, name="defaults")
    def data_defaults(d):
        d.dataset, d.lr = "cifar10", 0.001

    @model.add
    def small(m):
        m.lr = 0.2

    @data.add(name="small")
    def small_data(d):
        d.dataset = "digits"
        with data.lazy():
            d.classes = 10 if d.dataset == "digits" else 1000

    layers = Layers(model=model, data=data)

    @layers.add(default=True)
    def both(c):
        c.seed = 1
        c.data.workers = 4

    config = layers.resolve(["model.backbone=%resnet101%", "data.lr=0.5"])
    assert config == {
        "model": {"backbone": "resnet101", "lr": 0.1},
        "data": {"dataset": "cifar10", "lr": 0.5, "workers": 4},
        "seed": 1,
    }
    assert layers.resolve(["model.small"]).model.lr == 0.2
    assert layers.resolve(["model.small"]).data.dataset == "cifar10"
    assert layers.resolve(["small"]).data == {
        "dataset": "digits", "lr": 0.001, "workers": 4, "classes": 10,
    }  # fmt: skip
    assert config.why("model.lr").startswith("model.lr = 0.1  <- model.defaults (")

    def train(model, data, seed):
        return model.lr, data.lr, seed

    assert train(**config) == (0.1, 0.5, 1)


@pytest.mark.parametrize("namespace", ["update", "items", "why"])
def test_a_namespace_is_no_method_of_the_configuration(namespace):
    with pytest.raises(SchemaValidationError, match="method"):
        Layers(**{namespace: Layers()})
    with pytest.raises(SchemaValidationError, match="model must be a Layers, not dict"):
        Layers(model={})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"name": "two words"}, "a single word"),
        ({"name": "manual"}, "a reserved name"),
        ({"name": "taken"}, "the layer 'taken' already exists"),
        ({"name": "x", "priority": "high"}, "priority must be a number"),
        ({"name": "x", "after": [1]}, "after must be layer names"),
    ],
)
def test_bad_arguments_are_named(options, said):
    layers = Layers()
    write(layers, "taken", {})
    with pytest.raises(SchemaValidationError, match=said):
        write(layers, values={}, **options)


@pytest.mark.parametrize("prefix", ["", "QUARK_", "quark_x", 3])
def test_the_environment_needs_a_prefix(prefix):
    with pytest.raises(SchemaValidationError, match="prefix must be a str such as"):
        Layers().add_environment(prefix)


def test_variables_nest_by_two_underscores():
    layers = Layers()
    layers.add_environment("TRAIN_")
    config = layers.resolve([], environ={"TRAIN_MODEL__LR": "1e-3", "TRAIN_FAST": "true"})
    assert config == {"model": {"lr": 0.001}, "fast": True}
    assert config.why("model.lr") == "model.lr = 0.001  <- environment (TRAIN_MODEL__LR)"


def test_a_word_that_names_no_layer_is_told_with_what_there_is():
    with pytest.raises(SchemaValidationError, match=r"'high_l'.*did you mean 'high_lr'"):
        make_layers().resolve(["high_l"])


def test_a_misspelled_setting_is_refused_and_a_new_one_is_taken():
    layers = make_layers()
    with pytest.raises(SchemaValidationError, match="did you mean 'batch_size'"):
        layers.resolve(["bach_size=3"])
    assert layers.resolve(["+bach_size=3"]).bach_size == 3
    assert layers.resolve(["run_name=x"]).run_name == "x"


def make_parser():
    parser = argparse.ArgumentParser(prog="train")
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--optimizer.name", default="sgd")
    return parser


def test_a_parser_is_asked_first_and_its_defaults_count_least():
    layers = make_layers()
    config = layers.resolve(["--device", "cuda", "high_lr", "batch_size=64"], parser=make_parser())
    assert config == {
        "lr": 0.02, "batch_size": 64, "device": "cuda", "optimizer": {"name": "sgd"},
    }  # fmt: skip
    assert config.why("device") == 'device = "cuda"  <- command line (--device)'
    assert "<- 0.5 argparse default (--lr)" in config.why("lr")
    # Given as its default is, it was given all the same.
    assert layers.resolve(["--lr", "0.5"], parser=make_parser()).lr == 0.5


def test_help_of_a_parser_works_as_ever(capsys):
    with pytest.raises(SystemExit) as ended:
        make_layers().resolve(["--help"], parser=make_parser())
    assert ended.value.code == 0
    assert "--device {cpu,cuda}" in capsys.readouterr().out


def test_a_parser_with_commands_tells_what_was_given():
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command")
    train = commands.add_parser("train")
    train.add_argument("--epochs", type=int, default=3)
    train.add_argument("--width", type=int, default=8)
    config = Layers().resolve(["train", "--epochs", "5"], parser=parser)
    assert config == {"command": "train", "epochs": 5, "width": 8}
    assert "command line" in config.why("epochs")
    assert config.why("width") == "width = 8  <- argparse default (--width)"


def test_manual_tells_the_order_and_each_setting_and_ends_the_program(capsys):
    layers = make_layers()

    @layers.manual
    def texts(c):
        c.lr = "learning rate of the optimizer"
        c.dropout = "not used yet"

    with pytest.raises(SystemExit) as ended:
        layers.resolve(["high_lr", "batch_size=64", "manual"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    order = said.splitlines()[1]
    names = [each.partition(" (")[0].strip() for each in order.split("->")]
    assert names == ["defaults", "high_lr", "command line", "scaled"]
    assert "Left out: higher_lr" in said
    (line,) = [each for each in said.splitlines() if each.startswith("  lr = ")]
    parts = ["lr = 0.02  <- scaled (", ") <- 0.01 high_lr (", ") <- 0.001 defaults ("]
    assert [line.index(part) for part in parts] == sorted(line.index(part) for part in parts)
    assert "      learning rate of the optimizer\n" in said
    assert "  dropout: not used yet\n" in said


def test_manual_shows_no_secret_and_nothing_that_commands_a_terminal(capsys):
    layers = Layers()
    write(
        layers, "base", {"db": {"password": "hunter2hunter2"}, "name": "\x1b[31mred"}, default=True
    )
    with pytest.raises(SystemExit):
        layers.resolve(["manual"])
    said = capsys.readouterr().out
    assert "hunter2" not in said
    assert "\x1b" not in said


def test_a_name_is_that_of_the_function_and_add_gives_the_function_back():
    layers = Layers()

    @layers.add
    def plain(c):
        c.x = 1

    assert callable(plain)
    assert layers.resolve(["plain"]).x == 1
    assert "plain" in repr(layers)
    assert isinstance(layers.resolve([]), LayeredConfig)
    assert quark.Layers is Layers
