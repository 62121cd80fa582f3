import pytest

from kvxfer.errors import ConfigError
from kvxfer.router.identity import IdentityError, check_probe, check_role, parse_info, reachable_host
from kvxfer.router.settings import Mode, Role, RouterSettings, engine_url

LINE = 'kvxfer_info{engine="%d",engine_id="%s",host="%s",port="%s",tp_size="2",pp_size="3",role="kv_producer",mode="push",wire="1"} 1.0\n'


def info(*rows):
    return "# TYPE kvxfer_info gauge\n" + "".join(LINE % row for row in rows) + 'other{a="b"} 2.0\n'


def test_one_engine():
    (one,) = parse_info(info((0, "p", "10.0.0.1", 5600)), "10.0.0.1")
    assert (one.engine_id, one.host, one.port, one.tp_size, one.pp_size) == ("p", "10.0.0.1", 5600, 2, 3)
    assert one.dp_rank is None


def test_every_data_parallel_engine_is_read_in_rank_order():
    found = parse_info(info((1, "p_dp1", "h", 5601), (0, "p_dp0", "h", 5600), (0, "p_dp0", "h", 5600)), "h")
    assert [(one.engine_id, one.dp_rank) for one in found] == [("p_dp0", 0), ("p_dp1", 1)]


def test_escaped_label_values():
    text = 'kvxfer_info{model_name="a\\"},\\\\b\\nc",engine_id="x\\"y",host="h",port="1",tp_size="1"} 1\n'
    assert parse_info(text, "h")[0].engine_id == 'x"y'


def test_missing_metric_says_what_to_start():
    with pytest.raises(IdentityError, match="start vLLM with a kvxfer connector"):
        parse_info("vllm:x 1.0\n# kvxfer_info{} is not a sample\n", "h")


@pytest.mark.parametrize(
    "text",
    [
        'kvxfer_info{engine_id="p"} 1.0',
        'kvxfer_info{engine_id="p",host="h",port="x",tp_size="1"} 1.0',
        'kvxfer_info{engine_id="p",host="h",port="70000",tp_size="1"} 1.0',
        'kvxfer_info{engine_id="p",host="h",port="1",tp_size="0"} 1.0',
        'kvxfer_info{engine_id="p",host="h",port="1",tp_size="1",leg_timeout="nan"} 1.0',
        'kvxfer_info{engine_id="p",host="h",port="1",tp_size="1",leg_timeout="-1"} 1.0',
    ],
)
def test_a_sample_that_is_not_understood_is_shown(text):
    with pytest.raises(IdentityError, match="engine_id="):
        parse_info(text, "h")


@pytest.mark.parametrize(
    ("advertised", "url_host", "host"),
    [
        ("10.0.0.1", "10.9.9.9", "10.0.0.1"),
        ("0.0.0.0", "10.9.9.9", "10.9.9.9"),
        ("::", "fd00::1", "fd00::1"),
        ("[::]", "fd00::1", "fd00::1"),
        ("0.0.0.0", "127.0.0.1", "127.0.0.1"),
        ("127.0.0.1", "10.9.9.9", "10.9.9.9"),
        ("localhost", "node-1", "node-1"),
        ("::1", "node-1", "node-1"),
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("127.0.0.1", "localhost", "127.0.0.1"),
        ("[fd00::2]", "fd00::1", "fd00::2"),
    ],
)
def test_reachable_host(advertised, url_host, host):
    assert reachable_host(advertised, url_host) == host


def answer(**params):
    return {
        "kv_transfer_params": {"remote_engine_id": "p", "remote_host": "10.0.0.1", "remote_port": 5600, "tp_size": 2}
        | params
    }


def test_the_probe_agrees():
    (one,) = parse_info(info((0, "p", "10.0.0.1", 5600)), "10.0.0.1")
    check_probe(one, answer(), "10.0.0.1")
    check_probe(one, answer(remote_port="5600"), "10.0.0.1")
    check_probe(one, answer(remote_host="0.0.0.0"), "10.0.0.1")


def test_a_wildcard_in_the_metric_contradicts_no_host():
    (one,) = parse_info(info((0, "p", "0.0.0.0", 5600)), "node-1")
    check_probe(one, answer(), "node-1")


@pytest.mark.parametrize(
    ("params", "values"),
    [
        ({"remote_engine_id": "q"}, ["'p'", "'q'"]),
        ({"remote_port": 5700}, ["5600", "5700"]),
        ({"remote_host": "10.0.0.2"}, ["10.0.0.1", "10.0.0.2"]),
        ({"remote_host": None}, ["10.0.0.1", "None"]),
        ({"tp_size": 4}, ["2", "4"]),
    ],
)
def test_a_difference_names_both_values(params, values):
    (one,) = parse_info(info((0, "p", "10.0.0.1", 5600)), "10.0.0.1")
    with pytest.raises(IdentityError) as caught:
        check_probe(one, answer(**params), "10.0.0.1")
    assert all(value in str(caught.value) for value in values)


@pytest.mark.parametrize(
    "wrong", [None, [], {}, {"kv_transfer_params": None}, {"kv_transfer_params": {"remote_engine_id": None}}]
)
def test_a_probe_that_no_connector_saw(wrong):
    (one,) = parse_info(info((0, "p", "h", 5600)), "h")
    with pytest.raises(IdentityError, match="connector did nothing"):
        check_probe(one, wrong, "h")


def test_role_and_mode_must_fit():
    found = parse_info(info((0, "p", "h", 1)), "h")
    check_role(found, Role.PREFILL, Mode.PUSH)
    with pytest.raises(IdentityError, match="--decode and says kv_role kv_producer"):
        check_role(found, Role.DECODE, Mode.PUSH)
    with pytest.raises(IdentityError, match=r"does push .* --mode pull"):
        check_role(found, Role.PREFILL, Mode.PULL)


def test_engine_urls():
    assert engine_url("http://[::1]:8000").host == "::1"
    assert str(engine_url("http://h:8000/base/") / "v1/models") == "http://h:8000/base/v1/models"
    for wrong in ("10.0.0.1:8000", "h", "", "http://", "ftp://h:1", "http://h:x", "http://h:8000/?a=1"):
        with pytest.raises(ConfigError, match=r"write it like|query"):
            engine_url(wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"prefill": ()},
        {"decode": ()},
        {"prefill": ("http://a:1", "http://a:1/")},
        {"request_timeout": 0},
        {"max_body_size": 0},
    ],
)
def test_settings_that_cannot_work_are_refused(wrong):
    with pytest.raises(ConfigError):
        RouterSettings(**({"prefill": ("http://a:1",), "decode": ("http://b:1",)} | wrong))
