"""Secrets in addresses: masked in what is written, handed over in the environment, put back to connect."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megarl.checks import dry_run
from megarl.checks.recipe import check_config
from megarl.config.load import dump_config, hide_credentials, load_config
from megarl.system.credentials import PASSWORD, USER, hide, mask, mask_argument, put_back, take_out
from megarl.system.errors import ConfigError, ServerError
from megarl.tracking import mlflow_log


@pytest.mark.parametrize(
    ("argument", "masked"),
    [
        ("tracking.mlflow_uri=https://me:it's@host/x", "tracking.mlflow_uri=https://***@host/x"),
        ('tracking.mlflow_uri=https://me:a "b"@host/x', "tracking.mlflow_uri=https://***@host/x"),
        ("reward.kwargs.api_key=sk-1", "reward.kwargs.api_key=***"),
        ("reward.kwargs={api_key: sk-1, n: [2]}", 'reward.kwargs={api_key: "***", n: [2]}'),
        (
            "reward.kwargs=!replace {a: {b: [{api-key: 'sk, 1'}]}}",
            'reward.kwargs=!replace {a: {b: [{api-key: "***"}]}}',
        ),
        ("env.args=[--api-key, sk-9, --n, 1]", 'env.args=[--api-key, "***", --n, 1]'),
        ("env.args=[--hf-token=t, x]", 'env.args=["--hf-token=***", x]'),
        (
            "reward.kwargs={secret: [a, {b: c}], api_key: null}",
            'reward.kwargs={secret: ["***", {b: "***"}], api_key: null}',
        ),
        ("reward.kwargs={url: 'http://me:word@host'}", "reward.kwargs={url: 'http://***@host'}"),
        ("model.tokenizer=chars:0123", "model.tokenizer=chars:0123"),
        ("reward.kwargs.token=13", "reward.kwargs.token=13"),
        ("reward.kwargs={token: 13, hf_token: t13}", 'reward.kwargs={token: 13, hf_token: "***"}'),
        ("--run-dir", "--run-dir"),
    ],
)
def test_arguments_of_a_command_are_masked(argument: str, masked: str) -> None:
    assert mask_argument(argument) == masked


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("https://me:pw@host/x", "https://***@host/x"),
        ("https://token@host", "https://***@host"),
        ("postgresql+psycopg2://me:a@b@host:5432/db", "postgresql+psycopg2://***@host:5432/db"),
        ("['http://a:b@c', 'http://d']", "['http://***@c', 'http://d']"),
        ("mysql://host/db?password=x&ssl=1", "mysql://host/db?password=***&ssl=1"),
        ("https://host/?access_token=x", "https://host/?access_token=***"),
        ("sqlite:////runs/mlflow.db", "sqlite:////runs/mlflow.db"),
        ("mail me@host; see http://host/a@b", "mail me@host; see http://host/a@b"),
        ("https://***@host", "https://***@host"),
        ("postgresql://me:pa/s?s#x@host/db", "postgresql://***@host/db"),
        ("mysql://me:pw@host:1/db?o=a@b", "mysql://***@host:1/db?o=a@b"),
        ("postgresql://***@host:1/db?o=a@b", "postgresql://***@host:1/db?o=a@b"),
        ("sqlite:////runs/me@host/a:b@c.db", "sqlite:////runs/me@host/a:b@c.db"),
        ("https://host/x?sig=a&se=b", "https://host/x?sig=***&se=b"),
        ("https://host/x?key=a&sort_key=b", "https://host/x?key=***&sort_key=b"),
        ("Authorization: Bearer abcdefghijklmnop", "Authorization: Bearer ***"),
        ("s3://b?access_key=a&aws_secret_access_key=b", "s3://b?access_key=***&aws_secret_access_key=***"),
    ],
)
def test_what_is_masked_and_what_is_not(text: str, masked: str) -> None:
    assert mask(text) == masked


def test_a_database_gets_its_credentials_back_and_http_leaves_them_to_the_client() -> None:
    environment: dict[str, str] = {}
    uri = take_out("postgresql://me:p%40ss@host/db", environment)
    assert uri == "postgresql://***@host/db"
    assert environment == {"MLFLOW_TRACKING_USERNAME": "me", "MLFLOW_TRACKING_PASSWORD": "p@ss"}
    assert take_out(uri, environment) == uri
    assert put_back(uri, environment) == "postgresql://me:p%40ss@host/db"
    assert put_back("https://***@host/x", environment) == "https://host/x"
    assert put_back("sqlite:///a.db", {}) == "sqlite:///a.db"


def test_a_password_of_a_database_may_hold_any_character() -> None:
    environment: dict[str, str] = {}
    uri = take_out("postgresql://me:p' a/s?s#x@host/db", environment)
    assert (uri, environment[PASSWORD]) == ("postgresql://***@host/db", "p' a/s?s#x")
    assert put_back(uri, environment) == "postgresql://me:p%27%20a%2Fs%3Fs%23x@host/db"


def test_a_user_name_without_a_password_goes_back_into_the_address() -> None:
    environment: dict[str, str] = {}
    uri = take_out("https://to%40ken@host/x", environment)
    assert uri == "https://***@host/x"
    assert put_back(uri, environment) == "https://to%40ken@host/x"


@pytest.mark.parametrize(
    "uri", ["postgresql://h/db?user=me&password=secret", "https://me:pw@host/?sig=x", "s3://b?aws_secret_access_key=x"]
)
def test_an_address_whose_secrets_cannot_be_taken_out_is_refused(uri: str) -> None:
    config = load_config("grpo_quickstart", [f"tracking.mlflow_uri={uri}", "tracking.mlflow=false"])
    (check,) = [check for check in check_config(config).items if check.key == "tracking.mlflow_uri"]
    assert check.status == "fail"
    assert "contains a secret that would be written" in str(check.problem())
    assert not any(secret in str(check.problem()) for secret in ("=secret", "=x"))


def test_without_the_variables_a_masked_address_cannot_be_used() -> None:
    with pytest.raises(KeyError, match="MLFLOW_TRACKING_USERNAME"):
        put_back("https://***@host", {})


def test_messages_show_no_secrets() -> None:
    assert "pw" not in str(ConfigError("wrong", found=["https://me:pw@host"]))
    assert "pw" not in str(ServerError("server 0", "https://me:pw@host", "start", "no"))


def test_a_run_writes_no_credentials_and_takes_them_from_the_environment_when_it_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (USER, PASSWORD):
        monkeypatch.setenv(name, "another")
    recipe = tmp_path / "config.yaml"
    uri = "https://me:sesame@host:5000/x"
    recipe.write_text(dump_config(hide_credentials(load_config("grpo_quickstart", [f"tracking.mlflow_uri={uri}"]))))
    assert (os.environ[USER], os.environ[PASSWORD]) == ("me", "sesame")
    assert "https://***@host:5000/x" in recipe.read_text()
    assert "sesame" not in recipe.read_text()

    resumed = hide_credentials(load_config(recipe))
    assert (os.environ[USER], os.environ[PASSWORD]) == ("me", "sesame")
    assert [check for check in check_config(resumed).items if check.key == "tracking.mlflow_uri"] == []
    monkeypatch.delenv(PASSWORD)
    (check,) = [check for check in check_config(resumed).items if check.key == "tracking.mlflow_uri"]
    assert check.status == "fail"
    assert f"{USER} and {PASSWORD}" in str(check.problem())


def test_mlflow_is_called_with_what_was_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow.tracking

    called: list[str] = []
    monkeypatch.setattr(mlflow.tracking, "MlflowClient", called.append)
    monkeypatch.setenv(USER, "me")
    monkeypatch.setenv(PASSWORD, "secret")
    mlflow_log._connect("postgresql://***@host/db")
    mlflow_log._connect("https://***@host")
    assert called == ["postgresql://me:secret@host/db", "https://host"]
    assert mlflow_log._text(ValueError("no login for me with secret")) == "ValueError: no login for me with ***"


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("data.loader_kwargs={hf_token: sesame, pad_token: y, api_key: '', seed: 1}", "data.loader_kwargs.hf_token"),
        ("reward.kwargs={apiKey: sesame, answer_key: a, api_key_env: JUDGE_KEY}", "reward.kwargs.apiKey"),
        ("reward.kwargs={openai_key: sesame}", "reward.kwargs.openai_key"),
        ("reward.kwargs={headers: {Authorization: sesame}}", "reward.kwargs.headers.Authorization"),
        ("reward.kwargs={headers: [Authorization=sesame]}", "reward.kwargs.headers"),
        ("reward.kwargs={password: 7357}", "reward.kwargs.password"),
        ("reward.kwargs={url: 'https://host/v1?key=sesame'}", "reward.kwargs.url"),
        ("reward.kwargs={url: 'https://me:sesame@host/v1'}", "reward.kwargs.url"),
        ("reward.kwargs={model: sk-ABCDEFGHsesame0123456789}", "reward.kwargs.model"),
        ("reward={parts: {a: {name: math, kwargs: {bearer: sesame}}}}", "reward.parts.a.kwargs.bearer"),
        ("env={name: tools, mcp: {a: {command: c, args: [--api-key, sesame]}}}", "env.mcp.a.args"),
        ("launch.slurm.environment={HTTP_PROXY: 'http://me:sesame@proxy'}", "launch.slurm.environment.HTTP_PROXY"),
    ],
)
def test_a_recipe_with_a_secret_is_refused_and_shown_masked(setting: str, key: str) -> None:
    config = load_config("grpo_quickstart", [setting])
    (check,) = [check for check in check_config(config).items if check.name == "secrets"]
    assert (check.status, check.key) == ("fail", key)
    assert "export it" in str(check.problem())
    text = "".join(dry_run._config_text(config, full=full) for full in (True, False)) + str(check.problem())
    assert "sesame" not in text
    assert "7357" not in text
    with pytest.raises(ConfigError) as caught:
        raise ConfigError("wrong", where=key, found=config.model_dump()["reward"])
    assert "sesame" not in str(caught.value)


def test_words_of_a_recipe_that_are_no_secrets_pass() -> None:
    keys = "eos_token: a, answer_key: a, token_env: A, use_auth: yes, secret: null, max_tokens: 3, auth: false, key: k"
    settings = [f"reward.kwargs={{{keys}, token: 13}}", "launch.kubernetes.secrets={HF_TOKEN: hub/token}"]
    config = load_config("grpo_quickstart", [*settings, "launch.kubernetes.image_pull_secret=registry"])
    assert hide(config.model_dump()) == (config.model_dump(), [])
