"""Which teacher a prompt has: named by its row, else drawn by the weights."""

import pytest

from megarl.config.training import TeacherConfig
from megarl.data.rows import Row
from megarl.data.teachers import check_teachers, choose_teacher
from megarl.rollout.seeds import Seeds
from megarl.system.errors import DataError


def config(math=1.0, code=1.0, **more) -> TeacherConfig:
    models = {"math": {"path": "m", "weight": math}, "code": {"path": "c", "weight": code}}
    return TeacherConfig(models=models, **more)


def test_a_row_names_its_teacher_also_inside_a_column():
    assert choose_teacher(config(), {"teacher": "code"}, 0) == "code"
    assert choose_teacher(config(key="extra.who"), {"extra": {"who": "code"}}, 0) == "code"


@pytest.mark.parametrize(("math", "code"), [(3.0, 1.0), (0.0, 2.0), (1.0, 0.0)])
def test_others_are_drawn_by_the_weights_and_by_their_uid(math, code):
    drawn = [
        choose_teacher(config(math, code), {"teacher": None}, Seeds(7).teacher(f"train-0-{i}")) for i in range(4000)
    ]
    share = math / (math + code)
    # Five standard deviations of a share of 4,000 draws; none where it is certain.
    assert abs(drawn.count("math") / 4000 - share) <= 5 * (share * (1 - share) / 4000) ** 0.5
    assert drawn[:50] == [choose_teacher(config(math, code), {}, Seeds(7).teacher(f"train-0-{i}")) for i in range(50)]


@pytest.mark.parametrize(
    ("columns", "weights", "says"),
    [
        ({"teacher": "cod"}, {}, "did you mean 'code'"),
        ({"teacher": "poems"}, {}, "teacher.models.poems"),
        ({"teacher": ["code"]}, {}, "names an unknown teacher"),
        ({"question": "1+1"}, {"math": 0.0, "code": 0.0}, "names no teacher"),
    ],
)
def test_a_row_without_a_teacher_that_there_is_is_refused(columns, weights, says):
    rows = [Row({"teacher": "math"}, "train.jsonl", 1, "line"), Row(columns, "train.jsonl", 2, "line")]
    with pytest.raises(DataError) as caught:
        check_teachers(config(**weights), rows)
    assert says in str(caught.value)
    assert "train.jsonl:2" in str(caught.value)
    check_teachers(TeacherConfig(path="m"), rows)
