"""Bad inputs by kind: what a user may get wrong, and the place that the message has to name.

A row is `KEY=VALUE & KEY=VALUE -> PLACE`, on top of the small recipe of tests/config/conftest.py; without a place it is
the first key. The files that rows name are in FILES, BYTES and MODELS.
"""

# ruff: noqa: E501
import json
from pathlib import Path
from typing import Any

_GOOD = '{"prompt": "1+1=", "answer": "2"}\n'
FILES = {
    "good.jsonl": _GOOD * 4,
    "broken.jsonl": _GOOD + '{"prompt": "1+\n',
    "empty.jsonl": "",
    "blank.jsonl": "\n\n",
    "lists.jsonl": "[1, 2]\n",
    "scalars.jsonl": "3\n",
    "twice.jsonl": '{"prompt": "1", "prompt": "2", "answer": "1"}\n',
    "misnamed.jsonl": '{"promt": "1+1=", "answer": "2"}\n',
    "unanswered.jsonl": _GOOD + '{"prompt": "1+2="}\n',
    "number.jsonl": '{"prompt": 3, "answer": "2"}\n',
    "null.jsonl": '{"prompt": null, "answer": "2"}\n',
    "strings.jsonl": '{"prompt": ["1"], "answer": "2"}\n',
    "headless.jsonl": '{"prompt": [{"role": "user"}], "answer": "2"}\n',
    "chat.jsonl": '{"prompt": [{"role": "user", "content": "1"}], "answer": "2"}\n',
    "role.jsonl": '{"prompt": [{"role": "usr", "content": "1"}], "answer": "2"}\n',
    "assistant.jsonl": '{"prompt": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}], "answer": "2"}\n',
    "image.jsonl": '{"prompt": "1+1=", "answer": "2", "images": ["a.png"]}\n',
    "letters.jsonl": '{"prompt": "a+b", "answer": "2"}\n',
    "long.jsonl": f'{{"prompt": "{"1" * 99}", "answer": "2"}}\n',
    "nothing.jsonl": '{"prompt": "", "answer": "2"}\n',
    "half.jsonl": '{"prompt": "1\\ud83d", "answer": "2"}\n',
    "deep.jsonl": f'{{"prompt": "1", "answer": "2", "x": {"[" * 99}{"]" * 99}}}\n',
    "digits.jsonl": f'{{"prompt": "1", "answer": "2", "x": {"9" * 5000}}}\n',
    "noanswer.jsonl": '{"prompt": "1+1=", "answer": null}\n',
    "emptyanswer.jsonl": '{"prompt": "1+1=", "answer": ""}\n',
    "dictanswer.jsonl": '{"prompt": "1+1=", "answer": {"a": 1}}\n',
    "nan.jsonl": '{"prompt": "1+1=", "answer": NaN}\n',
    "one.json": '{"prompt": "1"}',
    "extra.json": '{"prompt": "1"}\n{"prompt": "2"}',
    "cut.json": '[{"prompt": "1"}',
    "header.csv": "prompt,prompt\n1,2\n",
    "fewer.csv": "prompt,answer\n1\n",
    "more.csv": "prompt,answer\n1,2,3\n",
    "noheader.csv": "\n1,2\n",
    "bare.csv": "prompt,answer\n",
    "bad.parquet": "PAR1 nothing",
    "notes.txt": "hello",
    "splits/train.jsonl": _GOOD,
    "splits/test.jsonl": _GOOD,
    "rewards.py": "def score(samples):\n    return [0.0 for s in samples]\n",
    "syntax.py": "def score(samples:\n",
    "noargs.py": "def score():\n    return []\n",
    "broken.jinja": "{% for m in messages %}",
}
BYTES = {
    "utf16.jsonl": _GOOD.encode("utf-16"),
    "latin.csv": "prompt,answer\n\xe4,2\n".encode("latin-1"),
    "bytes.py": 'def score(samples):\n    return "\xe4"\n'.encode("latin-1"),
    "nulls.py": "def score(samples):\n    return []\n".encode("utf-16-le"),
}
_QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 32,
    "max_position_embeddings": 256,
}
#: Files of model folders.
MODELS = {
    "m_broken/config.json": '{"model_type": ',
    "m_list/config.json": "[1]",
    "m_notype/config.json": json.dumps({"hidden_size": 64}),
    "m_gpt2/config.json": '{"model_type": "gpt2"}',
    "m_noweights/config.json": json.dumps(_QWEN3),
    "m_quant/config.json": json.dumps({**_QWEN3, "quantization_config": {"quant_method": "gptq", "bits": 4}}),
    "m_adapter/adapter_config.json": "{}",
    "m_cut/config.json": json.dumps(_QWEN3),
    "m_cut/model.safetensors": "abc",
}
INPUTS = {
    "numbers": """
data.batch_size=1000000000 -> rollout.sampling.max_new_tokens
data.batch_size=-1
data.batch_size=0
data.batch_size=1.5
data.batch_size=99999999999999999999999
data.max_prompt_tokens=1000000000000 -> rollout.sampling.max_new_tokens
data.val_batch_size=99999999999999999999999
data.max_val_samples=0
data.max_val_samples=99999999999999999999999
trainer.steps=99999999999999999999999
trainer.steps=1e3
trainer.steps=-5
trainer.seed=99999999999999999999999
trainer.save_every=-1
trainer.save_every=99999999999999999999999
trainer.keep_last=0
trainer.keep_last=99999999999999999999999
rollout.sampling.temperature=1e9
rollout.sampling.temperature=-1
rollout.sampling.temperature=1e-30
validation.sampling.temperature=1e9
rollout.sampling.n=0
rollout.sampling.n=1000000000 -> rollout.sampling.max_new_tokens
rollout.sampling.n=99999999999999999999999
rollout.sampling.top_p=1.5
rollout.sampling.top_p=0
rollout.sampling.top_k=-1
rollout.sampling.min_p=1
rollout.sampling.min_p=-0.1
rollout.sampling.top_k=99999999999999999999999
rollout.sampling.max_new_tokens=0
rollout.sampling.max_new_tokens=99999999999999999999999
rollout.sampling.min_new_tokens=9
rollout.sampling.stop_token_ids=[-1]
rollout.sampling.stop_token_ids=[99]
rollout.sampling.stop=['']
rollout.sampling.stop=[[a]]
rollout.max_running=0
rollout.max_running=99999999999999999999999
rollout.max_prefill_tokens=99999999999999999999999
rollout.stale_steps=99999999999999999999999
rollout.limits.turns=99999999999999999999999
rollout.limits.tokens=20
rollout.limits.turns=3
rollout.limits={seconds: 5} -> rollout.limits.seconds
trainer.best_metric=val/ac & data.val_files=[good.jsonl]
trainer.early_stop={patience: 3} -> trainer.early_stop.metric
reward.skip_special_tokens=false & reward.name=exact_match
trainer.profile.steps=[0]
trainer.profile={steps: [2, 101]} -> trainer.profile.steps
trainer.profile={ranks: [64]} -> trainer.profile.ranks
trainer.profile={tool: nsys} -> trainer.profile.tool
data.loader_workers=-1
trainer.early_stop={metric: critic/score/mean} -> trainer.early_stop.patience
rollout.limits.seconds=-1
algorithm.loss.clip_low=2
algorithm.loss.clip_low=-0.1
algorithm.loss.dual_clip=0.5
algorithm.loss.entropy_coef=-5
algorithm.loss.entropy_coef=1e9
algorithm.loss.sum_norm=-1
algorithm.kl.coef=-1
algorithm.kl.coef=1e30
algorithm.kl.horizon=99999999999999999999999
algorithm.kl.target=0
algorithm.overlong.factor=1e30
algorithm.overlong.buffer_tokens=100
algorithm.dynamic_sampling.max_rounds=99999999999999999999999
actor.optim.lr=0
actor.optim.lr=-1e-6
actor.optim.lr=1e10
actor.optim.lr=nan
actor.optim.min_lr=1
actor.optim.warmup_steps=99999999999999999999999
actor.optim.weight_decay=-1
actor.optim.weight_decay=1e9
actor.optim.beta1=1
actor.optim.beta2=1.5
actor.optim.eps=0
actor.optim.eps=1e9
actor.optim.clip_grad=-1
actor.ppo_epochs=0
actor.ppo_epochs=99999999999999999999999
actor.mini_batch_size=7
actor.engine.micro_batch_tokens=0
actor.engine.micro_batch_tokens=99999999999999999999999
actor.engine.logits_chunk_tokens=99999999999999999999999
critic.value_clip=-1
sft.steps=99999999999999999999999
sft.batch_size=99999999999999999999999
sft.stop_at_accuracy=2
validation.every=99999999999999999999999
validation.log_samples=99999999999999999999999
reward.workers=-1
reward.workers=1000000
reward.timeout_s=0
reward.timeout_s=1e300
reward.sample_timeout_s=-1
reward.on_error=maybe
reward.on_error=1e39
cluster.nproc=0
cluster.nproc=100000
cluster.nproc=99999999999999999999999
cluster.nnodes=99999999999999999999999
cluster.timeout_s=0
cluster.timeout_s=1e-9 -> cluster.nproc
cluster.timeout_s=1e300
cluster.start_timeout_s=1e300
cluster.threads=99999999999999999999999
cluster.max_restarts=99999999999999999999999
cluster.device_memory_gb=-80
cluster.device_memory_gb=1e30
tracking.peak_tflops=-1
tracking.peak_tflops=1e300
model.init_seed=99999999999999999999999
algorithm.advantage={name: gae, lam: 2} -> algorithm.advantage.lam
algorithm.advantage={name: gae, gamma: -1} -> algorithm.advantage.gamma
rollout_correction.is_threshold=-1
""",
    "data": """
data.train_files=[broken.jsonl] -> broken.jsonl:2
data.train_files=[empty.jsonl] -> empty.jsonl
data.train_files=[blank.jsonl] -> blank.jsonl
data.train_files=[lists.jsonl] -> lists.jsonl:1
data.train_files=[scalars.jsonl] -> scalars.jsonl:1
data.train_files=[twice.jsonl] -> twice.jsonl:1
data.train_files=[misnamed.jsonl] -> misnamed.jsonl:1
data.train_files=[unanswered.jsonl] -> unanswered.jsonl:2
data.train_files=[number.jsonl] -> number.jsonl:1
data.train_files=[null.jsonl] -> null.jsonl:1
data.train_files=[strings.jsonl] -> strings.jsonl:1
data.train_files=[headless.jsonl] -> headless.jsonl:1
data.train_files=[chat.jsonl] -> chat.jsonl:1
data.train_files=[letters.jsonl] -> letters.jsonl:1
data.train_files=[long.jsonl]
data.train_files=[nothing.jsonl] -> nothing.jsonl:1
data.train_files=[half.jsonl] -> half.jsonl:1
data.train_files=[deep.jsonl] -> deep.jsonl:1
data.train_files=[digits.jsonl] -> digits.jsonl:1
data.train_files=[noanswer.jsonl] -> noanswer.jsonl:1
data.train_files=[emptyanswer.jsonl] -> emptyanswer.jsonl:1
data.train_files=[dictanswer.jsonl] -> dictanswer.jsonl:1
data.train_files=[nan.jsonl] -> nan.jsonl:1
data.train_files=[one.json] -> one.json
data.train_files=[extra.json] -> extra.json:2
data.train_files=[cut.json] -> cut.json:1
data.train_files=[header.csv] -> header.csv:1
data.train_files=[fewer.csv] -> fewer.csv:2
data.train_files=[more.csv] -> more.csv:2
data.train_files=[noheader.csv] -> noheader.csv:1
data.train_files=[bare.csv] -> bare.csv
data.train_files=[bad.parquet] -> bad.parquet
data.train_files=[image.jsonl] -> image.jsonl:1
data.train_files=[assistant.jsonl] -> assistant.jsonl:1
data.train_files=[role.jsonl] -> role.jsonl:1
data.train_files=[utf16.jsonl] -> utf16.jsonl:1
data.train_files=[latin.csv] -> latin.csv:2
data.train_files=[splits] -> splits
data.train_files=[]
data.train_files=[long.jsonl] & data.overlong=error -> long.jsonl:1
data.prompt_key=question & data.train_files=[good.jsonl] -> good.jsonl:1
data.answer_key=solution & data.train_files=[good.jsonl] -> good.jsonl:1
sft.response_key=x & sft.steps=1 & data.train_files=[good.jsonl] -> good.jsonl:1
data.overlong=cut
data.shuffle=maybe
data.experts={} & algorithm.loss.expert_coef=1 -> data.experts.files
data.experts.files=[good.jsonl] -> algorithm.loss.expert_coef
data.experts.files=[good.jsonl] & algorithm.loss.name=luffy -> data.experts.in_group
data.experts={files: [good.jsonl], in_group: true} -> data.experts.in_group
data.experts={files: [good.jsonl], in_group: true, logp_key: p} -> data.experts.in_group
data.experts={files: [good.jsonl], logp_key: p} & algorithm.loss.expert_coef=1 -> data.experts.logp_key
data.experts={files: [good.jsonl], in_group: true} & algorithm.loss={name: luffy, expert_gate: 0} -> algorithm.loss.expert_gate
data.experts.files=[good.jsonl] & algorithm.loss.expert_coef=1 & rollout.replay_kept_tokens=true -> rollout.replay_kept_tokens
data.experts.files=[good.jsonl] & algorithm.loss.expert_coef=1 & rollout_correction.preset=bypass_ppo_clip_geo_rs -> algorithm.loss.expert_coef
data.experts.files=[good.jsonl] & algorithm.loss.expert_coef=1 & rollout_correction={preset: pg_is, is_batch_normalize: true} -> rollout_correction.is_batch_normalize
data.experts.share=0
algorithm.loss.name=luffy
algorithm.loss.expert_coef=1
algorithm.loss.expert_gate=0
data.replay={} -> rollout_correction.mode
data.replay.share=1
data.replay={max_age: 1} & rollout_correction.preset=ppo_is_bypass & async.max_staleness=1 -> data.replay.max_age
data.replay={max_age: 1} & rollout_correction.preset=ppo_is_bypass & rollout.stale_steps=1 -> data.replay.max_age
data.replay={share: 0.1} & rollout_correction.preset=ppo_is_bypass & data.batch_size=4 -> data.replay.share
data.curriculum={} -> data.curriculum.pools
data.curriculum.pools={hard: {up_to: 0.2}} -> data.curriculum.pools
data.curriculum.pools={easy: {}, hard: {up_to: 0.2}} -> data.curriculum.pools
data.curriculum.pools={unseen: {}} -> data.curriculum.pools
data.curriculum.pools={all: {weight: 0}} -> data.curriculum.pools
data.curriculum.pools={all: {weight: -1}} -> data.curriculum.pools.all.weight
data.curriculum={pools: {all: {}}, decay: 1} -> data.curriculum.decay
data.curriculum.pools={all: {}} & async={max_staleness: 1, order: as_ready} -> data.curriculum
sft.steps=5 & sft.stop_at_accuracy=0.5 -> sft.eval_every
""",
    "paths": """
data.train_files=[missing.jsonl]
data.train_files=[empty_folder]
data.train_files=[notes.txt]
data.train_files=[good.jsonl/x]
data.train_files=[missing:fn]
data.train_files=[megarl.nothing:fn]
data.train_files=[megarl.recipes.arithmetic:nothing]
data.val_files=[missing.csv]
data.val_split=0.5 & data.train_files=[good.jsonl] & data.val_files=[good.jsonl]
data.val_split=2.5 & data.train_files=[good.jsonl]
data.val_split=1.0e-99999
reward.name=judge -> reward.kwargs.url
reward.name=classifier -> reward.kwargs.path
reward.name=classifier & reward.kwargs.path=./missing -> reward.kwargs.path
reward.name=http & reward.kwargs.url=http://me:secret@h -> reward.kwargs.url
reward.name=http & reward.kwargs.url=http://h & reward.timeout_s=60 -> reward.kwargs.deadline_s
data.system_prompt=be_brief & data.train_files=[good.jsonl]
sft.train_files=[missing.json] & sft.steps=1
trainer.resume=nowhere
trainer.resume=empty_folder
trainer.resume=good.jsonl
trainer.resume=ckpt
trainer.resume=ckpt/step_3
tracking.dir=good.jsonl
name=a/b
name=..
critic.path=nowhere/at/all/x & algorithm.pipeline=ppo
reference.path=./nowhere & algorithm.kl.use=loss
teacher.path=./nowhere & algorithm.distillation.coef=0.1
data.train_files=[simulator] -> robot
""",
    "models": """
model.path=nowhere/at/all & model.hf_config=null & model.tokenizer=chars:0123456789+=
model.path=./nowhere & model.hf_config=null & model.tokenizer=chars:0123456789+=
model.path=good.jsonl & model.hf_config=null & model.tokenizer=chars:0123456789+=
model.path=empty_folder & model.hf_config=null & model.tokenizer=chars:0123456789+=
model.path=m_broken & model.hf_config=null & model.tokenizer=chars:0123456789+= -> m_broken/config.json
model.path=m_list & model.hf_config=null & model.tokenizer=chars:0123456789+= -> m_list/config.json
model.path=m_notype & model.hf_config=null & model.tokenizer=chars:0123456789+= -> m_notype/config.json
model.path=m_gpt2 & model.hf_config=null & model.tokenizer=chars:0123456789+= -> m_gpt2/config.json
model.path=m_noweights & model.hf_config=null & model.tokenizer=chars:0123456789+= -> m_noweights
model.path=m_quant & model.hf_config=null & model.tokenizer=chars:0123456789+= -> m_quant/config.json: quantization_config
model.path=m_adapter & model.hf_config=null & model.tokenizer=chars:0123456789+=
model.path=m_cut & model.hf_config=null & model.tokenizer=chars:0123456789+= -> m_cut/model.safetensors
model.path=m_noweights -> model
model.hf_config=null -> model
model.tokenizer=null
model.tokenizer=nowhere/at/all
model.tokenizer=good.jsonl
model.tokenizer=chars:
model.tokenizer=chars:112
model.tokenizer=words:
model.tokenizer=words:a a
model.hf_config.vocab_size=8
model.hf_config.vocab_size=-1
model.hf_config.hidden_size=big
model.hf_config.num_hidden_layers=0
model.hf_config.num_attention_heads=0
model.hf_config.num_attention_heads=3 -> model.hf_config.num_key_value_heads
model.hf_config.num_key_value_heads=3
model.hf_config.head_dim=15
model.hf_config.hidden_sizes=64
model.hf_config.max_position_embeddings=16 -> rollout.sampling.max_new_tokens
model.hf_config.rope_scaling={rope_type: spiral}
model.hf_config.hidden_act=swish9
model.hf_config.rms_norm_eps=-1
model.hf_config.attention_dropout=0.5 -> model.hf_config: attention_dropout
model.hf_config.is_causal=false
model.hf_config.intermediate_size=0
model.dtype=fp16
model.trust_remote_code=maybe
model.hf_config.model_type=qwen9 -> model.hf_config
""",
    "rewards": """
reward.name=gsm9k
reward.name=missing.py:f
reward.name=rewards.py
reward.name=rewards.py:missing
reward.name=syntax.py:score
reward.name=noargs.py:score -> reward.kwargs
reward.name=megarl.missing:fn
reward.name=bytes.py:score
reward.name=nulls.py:score
reward.name=:score
reward.name=rewards.py:
reward.kwargs={x: 1} -> reward.kwargs.x
reward.kwargs=3
reward.mode=parallel
reward.on_error=ignore
reward={name: rewards.py:score, kwargs: {x: 1}} -> reward.kwargs
reward={name: numeric, kwargs: {evaluated: 3}} -> reward.kwargs.evaluated
reward.kwargs={tolerance: 1} -> reward.kwargs.tolerance
""",
    "templates": """
data.format_prompt=missing.jinja
data.format_prompt=plain words
data.format_prompt={{ content -> data.format_prompt, line 1
data.format_prompt={% if %} -> data.format_prompt, line 1
data.format_prompt=broken.jinja -> data.format_prompt, line 1
data.format_prompt={{ level }} & data.train_files=[good.jsonl] -> good.jsonl:1
data.format_prompt={{ 1/0 }} & data.train_files=[good.jsonl] -> good.jsonl:1
data.format_prompt={{ content.nothing.more }} & data.train_files=[good.jsonl] -> good.jsonl:1
data.override_chat_template=missing.jinja
data.override_chat_template=plain
data.override_chat_template={% for m in messages %} -> data.override_chat_template, line 1
data.override_chat_template=broken.jinja -> data.override_chat_template, line 1
data.chat_template=true
data.chat_template=maybe
data.override_chat_template={{ messages[0].content }} & data.train_files=[number.jsonl] -> number.jsonl:1
data.format_prompt={{ content }}abc & data.train_files=[good.jsonl] -> good.jsonl:1
""",
    "clusters": """
cluster.nproc=3 -> data.batch_size
cluster.nproc=2 & actor.parallel.tp=4 -> actor.parallel.tp
cluster.nproc=4 & actor.parallel.tp=4 -> actor.parallel.tp
actor.parallel.tp=3
cluster.nproc=8 & actor.parallel.pp=8 -> actor.parallel.pp
actor.parallel.pp=2 -> cluster.nproc
cluster.nproc=2 & actor.parallel.vpp=2 -> actor.parallel.vpp
cluster.nproc=2 & actor.parallel.ep=2 -> actor.parallel.ep
actor.parallel.ep=2
actor.parallel.etp=2 -> actor.parallel.ep
actor.parallel.cp=2 -> cluster.nproc
cluster.nproc=2 & actor.parallel.tp=2 & actor.parallel.etp=2 -> actor.parallel.etp
cluster.nnodes=2
cluster.nproc=3 & cluster.nnodes=2
cluster.device_memory_gb=80
cluster.nproc=two
cluster.nproc=2 & data.batch_size=31 -> data.batch_size
cluster.nproc=2 & sft.steps=1 & sft.batch_size=3 -> sft.batch_size
placement.teams={a: {roles: [actor], devices: 1}}
placement.teams={a: {roles: [pilot], devices: 1}} -> placement.teams.a.roles
placement.teams=3
placement.auto=maybe
async.max_staleness=2
async.order=backwards
rollout.engine=vllm
rollout.engine=sglang & rollout.sglang.python=/nowhere -> rollout.sglang.python
rollout.engine=sglang & rollout.sglang.urls=[nonsense] -> rollout.sglang.urls
rollout.engine=sglang & rollout.sglang.servers=0 -> rollout.sglang.servers
rollout.sglang.memory_fraction=2
rollout.parallel.tp=3 -> rollout.parallel
critic.parallel.tp=3 & algorithm.pipeline=ppo -> critic.parallel
launch.launcher=mpi
launch.slurm.time=yesterday
launch.slurm.nothing=1
launch.kubernetes.namespace=Not_A_Name
sync.transport=pigeon
cluster.start_timeout_s=0
actor.parallel.tp=9007199254740992
actor.parallel.pp=9007199254740992 -> cluster.nproc
actor.parallel.vpp=9007199254740992
cluster.nproc=1000000
""",
    "names": """
actor.mini_batch_size=5
algorithm.pipeline=nosuch
algorithm.pipeline=missing.mod:fn
algorithm.loss.name=missing.py:fn
algorithm.loss.name=dpo
algorithm.advantage.name=gpro
algorithm.kl.estimator=k9
algorithm.kl={use: reward, estimator: full} -> algorithm.kl.estimator
algorithm.filter.name=missing.py:fn
algorithm.distillation.coef=0.1 -> teacher.path
algorithm.dynamic_sampling.enabled=true & rollout.sampling.n=1 -> rollout.sampling.n
rollout.sampling.n=1
algorithm.loss.aggregation=median
algorithm.loss.aggregation=seq-mean-token-sum-norm -> algorithm.loss.sum_norm
algorithm.kl.adaptive=true
actor.optim={schedule: cosine, decay_steps: 5, warmup_steps: 9} -> actor.optim.warmup_steps
rollout_correction.preset=nosuch
rollout_correction.rs_level=word
rollout.dtype=fp8
actor.engine.recompute=some
validation.every=often
""",
}
_NAN, _INFINITE = float("nan"), float("inf")
#: What a reward returns for two samples, and what is said of it.
REWARDS: list[tuple[Any, str]] = [
    (None, "returned None"),
    (1.0, "returned 1.0"),
    ("10", "returned '10'"),
    ({"overall": 1.0}, "returned {'overall': 1.0}"),
    ({0.0, 1.0}, "returned {0.0, 1.0} for 1 samples instead of a list"),
    ([], "returned 0 results"),
    ([1.0], "returned 1 results"),
    ([1.0, 2.0, 3.0], "returned 3 results"),
    ([1.0, None], "returned None, which is not a number"),
    ([1.0, "2"], "returned '2', which is not a number"),
    ([1.0, [2.0]], "returned [2.0], which is not a number"),
    ([1.0, 1j], "returned 1j, which is not a number"),
    ([1.0, _NAN], "returned nan"),
    ([1.0, _INFINITE], "returned inf"),
    ([1.0, -_INFINITE], "returned -inf"),
    ([1.0, 1e39], "returned 1e+39; allowed: -1e+15 to 1e+15"),
    ([1.0, 10**400], "raised OverflowError"),
    ([1.0, {}], "returned a dict without 'overall'"),
    ([1.0, {"score": 1.0}], "returned a dict without 'overall'"),
    ([1.0, {"overall": None}], "returned None for part 'overall', which is not a number"),
    ([1.0, {"overall": 1.0, "style": "good"}], "returned 'good' for part 'style', which is not a number"),
    ([1.0, {"overall": 1.0, "style": 1e39}], "returned 1e+39 for part 'style'"),
]


def write_files(folder: Path) -> None:
    """All files that the rows name."""
    for name, text in {**FILES, **MODELS}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for name, content in BYTES.items():
        (folder / name).write_bytes(content)
    (folder / "empty_folder").mkdir()
    (folder / "ckpt" / "step_3").mkdir(parents=True)


def rows(kind: str) -> list[tuple[list[str], str]]:
    """Overrides of each row of a kind, and the place that its message names."""
    found = []
    for line in INPUTS[kind].split("\n"):
        given, _, place = line.partition(" -> ")
        if given:
            overrides = given.split(" & ")
            found.append((overrides, place or overrides[0].partition("=")[0]))
    return found
