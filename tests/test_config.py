"""What a run is: who decides a setting, and how a wrong one is refused."""

import json

import pytest
from hypothesis import given as any_of
from hypothesis import strategies as st

from vqprompt.core.errors import UserError
from vqprompt.research.methods import METHODS
from vqprompt.research.migration import upgrade_config
from vqprompt.research.results.config import RunConfig, completed, parse_assignment, read_config_file, resolve
from vqprompt.research.runs.refusals import refuse_what_cannot_fit


class TestPrecedence:
    def test_given_preset_method_data_common(self, monkeypatch):
        """Each layer gives way to the one before it."""
        method = METHODS["vq-prompt"]
        layers = {"lr": 0.1, "epochs": 3, "batch_size": 11}, {"epochs": 4, "batch_size": 12, "size": 98}, {"lr": 0.5}
        monkeypatch.setattr(method, "presets", {"mine": {"lr": 0.2, **layers[0], "tau": 2.0}})
        monkeypatch.setattr(method, "training_defaults", layers[1])
        config = resolve({"method": "vq-prompt", "data": "quickdraw50", **layers[2]}, "mine")
        assert config.lr == 0.5, "given"
        assert (config.epochs, config.batch_size, config.options["tau"]) == (3, 11, 2.0), "the preset's"
        assert config.size == 98, "the method's"
        assert (config.augment, config.test_crop) == ("none", 0), "the data set's"
        assert config.min_lr == 1e-6, "everybody's"

    def test_a_folder_of_one_s_own_has_the_common_settings(self):
        config = resolve({"data": "/somewhere"})
        assert (config.size, config.batch_size, config.augment, config.test_crop) == (224, 128, "crop", 0.875)
        assert (config.epochs, config.lr, config.weight_decay, config.tasks, config.seed) == (20, 0.0025, 0, 10, 1)

    def test_images_of_a_folder_are_drawn_by_seed_and_those_of_a_named_set_are_the_first(self):
        assert resolve({"data": "/somewhere"}).train_choice == "seed"
        assert resolve({"data": "quickdraw50"}).train_choice == "first"
        saved = resolve({"data": "/somewhere"}).model_dump(mode="json")
        assert resolve({}, file=saved).train_choice == "seed"
        before_there_was_a_choice = {key: value for key, value in saved.items() if key != "train_choice"}
        assert resolve({}, file=upgrade_config(before_there_was_a_choice)).train_choice == "first"
        assert completed(before_there_was_a_choice)["train_choice"] == "first"

    def test_the_method_s_own_rate(self):
        assert resolve({"method": "ft"}).lr == 5e-5
        assert resolve({"method": "ft", "lr": 0.1}).lr == 0.1

    def test_options_beside_run_settings_or_in_their_group(self):
        for given in (
            {"tau": 5, "rebalancing.lr": 0.1},
            {"tau": 5, "rebalancing": {"lr": 0.1}},
            {"options": {"tau": 5, "rebalancing": {"lr": 0.1}}},
            {"options": {"tau": 9}, "tau": 5, "rebalancing.lr": 0.1},
        ):
            options = resolve(given).options
            assert options["tau"] == 5 and options["rebalancing"]["lr"] == 0.1
            assert options["rebalancing"]["epochs"] == 10, "the rest of the group stays"

    def test_a_group_in_a_preset_may_be_changed_in_part(self):
        options = resolve({"rebalancing.ratio": 3}, "released-cub").options
        assert options["rebalancing"]["lr"] == 1e-5 and options["rebalancing"]["ratio"] == 3
        assert METHODS["vq-prompt"].presets["released-cub"]["rebalancing"]["ratio"] == 2, "left alone"

    @pytest.mark.parametrize("method", [name for name, m in METHODS.items() if "closed-form" in m.presets])
    def test_closed_form_is_what_it_says_for_who_has_it(self, method):
        options = resolve({"method": method, "data": "cub200", "rebalancing.shrinkage": 0.5}, "closed-form").options
        assert options["statistics"] is True
        values = [options["rebalancing"][key] for key in ("how", "covariance", "shrinkage")]
        assert values == ["closed-form", "shared", 0.5]

    def test_each_option_of_a_data_set_applies_to_the_methods_that_have_it(self):
        """SLCA and HiDe-Prompt have a recipe of their own; a temperature belongs to a backbone, not to the data."""

        def options(method: str) -> dict:
            return resolve({"method": method, "data": "cub200=/birds"}).options

        assert options("vq-prompt")["tau"] == 1
        for method in ("vq-prompt", "l2p++-v2", "linear"):
            assert (options(method)["rebalancing"]["lr"], options(method)["rebalancing"]["ratio"]) == (1e-4, 2), method
        for method in ("slca", "hide-prompt"):
            assert options(method)["rebalancing"] == METHODS[method].Options().rebalancing.model_dump(), method
        assert (
            resolve({"method": "l2p++-v2", "data": "cub200=/birds", "rebalancing.lr": 0.5}).options["rebalancing"]["lr"]
            == 0.5
        ), "given"
        assert options("lwf") == METHODS["lwf"].Options().model_dump()

    def test_every_setting_is_there_and_repeats_the_run(self):
        first = resolve({"tau": 3, "tasks": [5, 5], "epochs": 2}, "released")
        again = resolve(json.loads(first.model_dump_json()))
        assert first == again
        assert first.options["commitment_weight"] == 0.4 and first.options["normalize_keys"] is True


class TestRefusals:
    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"epoch": 3}, "'epoch' for vq-prompt; did you mean 'epochs'"),
            ({"taus": 3}, "did you mean 'tau'"),
            ({"rebalancng.lr": 3}, "did you mean 'rebalancing'"),
            ({"qqqq": 3}, "'qqqq' for vq-prompt; there are epochs, "),
            ({"method": "ft", "tau": 3}, "'tau' for ft"),
            ({"method": "vqprompt"}, "unknown method 'vqprompt'; did you mean 'vq-prompt'"),
        ],
    )
    def test_unknown_names(self, given, message):
        with pytest.raises(UserError, match=message):
            resolve(given)

    @pytest.mark.parametrize(
        ("given", "field"),
        [
            ({"epochs": 0}, "epochs"), ({"epochs": "many"}, "epochs"), ({"lr": -1}, "lr"), ({"lr": float("nan")}, "lr"),
            ({"batch_size": 0}, "batch_size"), ({"augment": "blur"}, "augment"), ({"test_crop": 2}, "test_crop"),
            ({"validation": 1}, "validation"), ({"seed": -1}, "seed"), ({"tasks": "x"}, "tasks"), ({"size": 0}, "size"),
            ({"train_per_class": 0}, "train_per_class"), ({"tau": -1}, "tau"), ({"length": 5}, "length"),
            ({"rebalancing.lr": 0}, r"rebalancing\.lr"), ({"rebalancing.lrr": 1}, r"rebalancing\.lrr: no such setting"),
            ({"quantize": "no way"}, "quantize"), ({"blocks": "first"}, "blocks"), ({"rebalancing": 5}, "rebalancing"),
            ({"tau.x": 1}, "tau"), ({"tau": 1, "tau.x": 1}, "tau"), ({"size": 14000}, "size"),
            ({"device": "meta"}, "device"), ({"device": "cuda:"}, "device"), ({"compile": "yes"}, "compile"),
            ({"seed": 2**63}, "seed"),
        ],
    )  # fmt: skip
    def test_bad_values_name_the_field_and_what_was_given(self, given, field):
        with pytest.raises(UserError, match=field) as caught:
            resolve(given)
        value = next(iter(given.values()))
        if "." not in field and not isinstance(value, float) and "tau.x" not in given:
            assert repr(value) in str(caught.value)

    def test_several_mistakes_at_once(self):
        with pytest.raises(UserError, match=r"epochs: .*; lr: "):
            resolve({"epochs": 0, "lr": -1})

    def test_unknown_preset(self):
        with pytest.raises(UserError, match="vq-prompt has no preset 'publishd'; there are released"):
            resolve({}, "publishd")
        with pytest.raises(UserError, match="ft has no preset 'released'; it has none"):
            resolve({"method": "ft"}, "released")


class TestAssignments:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("tau=5", ("tau", 5)), ("lr=1e-4", ("lr", 1e-4)), ("augment=flip", ("augment", "flip")),
            ("quantize=false", ("quantize", False)), ("blocks=[0, 2]", ("blocks", [0, 2])),
            ("data=a=b", ("data", "a=b")),
            (" tau =5", ("tau", 5)), ('data="5"', ("data", "5")), ("data=", ("data", "")),
            ("train_per_class=null", ("train_per_class", None)),
        ],
    )  # fmt: skip
    def test_values_are_json_where_they_can_be(self, text, expected):
        assert parse_assignment(text) == expected

    @pytest.mark.parametrize("value", ["1" * 5000, "[" * 100_000])
    def test_values_that_cannot_be_read(self, value):
        with pytest.raises(UserError, match="too long or too deeply nested") as caught:
            parse_assignment(f"pool={value}")
        assert len(str(caught.value)) < 400

    @pytest.mark.parametrize("text", ["tau", "=5", ""])
    def test_no_assignment(self, text):
        with pytest.raises(UserError, match="expected key=value, as in --set tau=5"):
            parse_assignment(text)


class TestFiles:
    def test_json_and_toml_say_the_same(self, tmp_path):
        (tmp_path / "c.json").write_text('{"epochs": 3, "tau": 2.5, "rebalancing": {"lr": 0.01}}')
        (tmp_path / "c.toml").write_text("epochs = 3\ntau = 2.5\n[rebalancing]\nlr = 0.01\n")
        a, b = (read_config_file(tmp_path / name) for name in ("c.json", "c.toml"))
        assert a == b
        assert resolve(a).options["rebalancing"]["lr"] == 0.01

    @pytest.mark.parametrize(
        ("name", "text", "message"),
        [
            ("c.json", "{epochs: 3}", "not valid JSON"),
            ("c.toml", "epochs: 3", "not valid TOML"),
            ("c.json", "[1]", "expected an object of settings"),
            ("c.json", None, "cannot be read"),
            ("c.json", '{"a": ' * 100_000, "not valid JSON"),
            ("c.toml", f"a = {'[' * 100_000}", "not valid TOML"),
            ("c.json", f'{{"pool": {"1" * 5000}}}', "not valid JSON"),
            ("c.toml", f"pool = {'1' * 5000}", "not valid TOML"),
        ],
    )
    def test_bad_files_are_named(self, tmp_path, name, text, message):
        if text is not None:
            (tmp_path / name).write_text(text)
        with pytest.raises(UserError, match=f"--config .*{name}: {message}"):
            read_config_file(tmp_path / name)


class TestLimits:
    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"pool": 1_000_000_000}, "pool=1000000000: too large; give at most 100,000"),
            ({"method": "dualprompt", "pool": 10**9}, "pool"),
            ({"method": "hide-prompt", "length": 10**12}, "length"),
            ({"rebalancing.epochs": 10**9}, r"rebalancing\.epochs"),
            ({"tasks": 10**9}, "tasks"),
            (
                {"pool": 100_000, "length": 1_000_000},
                "GiB to train them; .* available. Choose a smaller pool",
            ),
        ],
    )
    def test_what_cannot_fit_is_refused_before_it_is_made(self, given, message):
        with pytest.raises(UserError, match=message):
            refuse_what_cannot_fit(resolve(given))

    @pytest.mark.parametrize("method", METHODS)
    def test_usual_settings_fit(self, method):
        refuse_what_cannot_fit(resolve({"method": method}))

    def test_a_weights_file_may_have_more_blocks_than_usual(self):
        refuse_what_cannot_fit(resolve({"backbone": "large.pth", "blocks": [0, 23]}))


def test_every_setting_of_a_run_reaches_the_loop():
    config = RunConfig(epochs=7, batch_size=3, lr=0.5, min_lr=0.1, weight_decay=0.2, optimizer="sgd", augment="flip")
    training = config.training
    assert training.model_dump().items() <= config.model_dump().items()
    assert (training.epochs, training.optimizer, training.augment) == (7, "sgd", "flip")


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.integers(20_000, 20_009).map(lambda bits: 1 << bits),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


KEYS = st.sampled_from([*RunConfig.model_fields, "tau", "pool", "rebalancing.lr"]) | st.text()


@any_of(st.sampled_from(sorted(METHODS)), st.dictionaries(KEYS, JSON_VALUES))
def test_any_settings_are_a_config_or_refused_in_words(method, settings):
    try:
        config = resolve({"method": method, **settings})
    except UserError as error:
        assert 0 < len(str(error)) < 100_000
    else:
        assert resolve(json.loads(config.model_dump_json())) == config


@pytest.mark.parametrize("key", ["method", "data", "options", "tasks", "blocks", "pool", "rebalancing"])
def test_numbers_and_nesting_that_python_cannot_print_are_refused(key):
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    for value in (1 << 20_000, deep):
        with pytest.raises(UserError, match=f"{key}: too many digits, or nested too deeply; give a simpler value"):
            resolve({key: value})


def test_a_check_of_several_settings_says_its_own_sentence_and_does_not_quote_all_of_them():
    with pytest.raises(UserError, match=r"^run settings: epochs=3: an online stream [^{]*; leave epochs out$"):
        resolve({"stream": "online:5", "epochs": 3})
