"""Wrong input for report.py and scaling.py."""

import pytest

from tests.bad_input.conftest import name_of

SCALING = [
    ("dir=''", ". holds neither a sweep.json with runs nor a run with config.yaml; name the folder"),
    ("dir=[]", "dir=[] must be a valid string"),
    ("dir=FILES/folder", "FILES/folder holds neither a sweep.json with runs nor a run with config.yaml; name"),
    ("dir=FILES/text.txt", "FILES/text.txt is not a readable runs.tar.xz of a published report (Input format"),
    ("dir=FILES/empty", "FILES/empty is not a readable runs.tar.xz of a published report (Compressed file"),
    ("dir=\x00", "\\x00 is not a folder; name that of a sweep, such as multirun/DATE/TIME"),
    (("dir=FILES/folder", "size=tokens"), "size=tokens must be 'parameters_without_embeddings' or 'parameters'"),
    (("dir=FILES/folder", "size=null"), "size=null must be 'parameters_without_embeddings' or 'parameters'"),
    (("dir=FILES/folder", "size=1"), "size=1 must be 'parameters_without_embeddings' or 'parameters'"),
    (("dir=FILES/folder", "resamples=39"), "resamples=39 must be greater than or equal to 40"),
    (("dir=FILES/folder", "resamples=true"), "resamples=true must be a valid integer"),
    (("dir=FILES/folder", "resamples=x"), "resamples='x' must be a valid integer"),
    (("dir=FILES/folder", "resamples=null"), "resamples=null must be a valid integer"),
    (("dir=FILES/folder", "resamples=1e3"), "resamples=1000.0 must be a valid integer"),
    (
        ("dir=FILES/folder", "resamples=1000000000000000000000000000000"),
        "FILES/folder holds neither a sweep.json with runs nor a run with config.yaml; name",
    ),
    (("dir=FILES/folder", "seed=-1"), "seed=-1 must be greater than or equal to 0"),
    (("dir=FILES/folder", "seed=true"), "seed=true must be a valid integer"),
    (("dir=FILES/folder", "seed=null"), "seed=null must be a valid integer"),
    (("dir=FILES/folder", "seed=1.5"), "seed=1.5 must be a valid integer"),
    (
        ("dir=FILES/folder", "predict=null"),
        "predict.parameters is missing; predict.tokens is missing; predict.flops is missing",
    ),
    (("dir=FILES/folder", "predict=[]"), "Error merging override predict=[]"),
    (("dir=FILES/folder", "predict.parameters=3"), "predict.parameters=3 must be a valid list"),
    (("dir=FILES/folder", "predict.parameters=[0]"), "predict.parameters.0=0 must be greater than 0"),
    (("dir=FILES/folder", "predict.parameters=[-1]"), "predict.parameters.0=-1 must be greater than 0"),
    (("dir=FILES/folder", "predict.parameters=[x]"), "predict.parameters.0='x' must be a valid number"),
    (("dir=FILES/folder", "predict.parameters=[nan]"), "predict.parameters.0=nan must be a finite number"),
    (("dir=FILES/folder", "predict.tokens=[inf]"), "predict.tokens.0=inf must be a finite number"),
    (("dir=FILES/folder", "predict.tokens=null"), "predict.tokens=null must be a valid list"),
    (("dir=FILES/folder", "predict.flops=[true]"), "predict.flops.0=true must be a valid number"),
    (("dir=FILES/folder", "predict.flops={}"), "Error merging override predict.flops={}"),
    (
        ("dir=FILES/folder", "predict.parameters=[]"),
        "FILES/folder holds neither a sweep.json with runs nor a run with config.yaml; name",
    ),
    (
        ("dir=FILES/folder", "+predict.data=[1]"),
        "there is no setting predict.data; choose one of predict.flops, predict.parameters,",
    ),
    (
        ("dir=FILES/folder", "~predict"),
        "predict.parameters is missing; predict.tokens is missing; predict.flops is missing",
    ),
    (("dir=FILES/folder", "~predict.flops"), "predict.flops is missing"),
    (("dir=FILES/folder", "~size"), "size is missing"),
    (("dir=FILES/folder", "~dir"), "dir is missing"),
    (("dir=FILES/folder", "out=[]"), "out=[] must be a valid string"),
    (
        ("dir=FILES/folder", "out=FILES/text.txt"),
        "FILES/folder holds neither a sweep.json with runs nor a run with config.yaml; name",
    ),
    (("dir=FILES/folder", "sizes=x"), "there is no setting sizes; did you mean size?"),
    (("dir=FILES/folder", "-m"), "-m starts a grid of training runs, which python script.py cannot; leave it out"),
]

REPORT = [
    ("dir=''", ". holds neither a sweep.json with runs nor a run with config.yaml; name the folder"),
    ("dir=[]", "dir=[] must be a valid string"),
    ("dir=FILES/folder", "FILES/folder holds neither a sweep.json with runs nor a run with config.yaml; name"),
    ("dir=FILES/text.txt", "FILES/text.txt is not a readable runs.tar.xz of a published report (Input format"),
    ("dir=FILES/empty", "FILES/empty is not a readable runs.tar.xz of a published report (Compressed file"),
    ("dir=FILES/binary", "FILES/binary is not a readable runs.tar.xz of a published report (Input format not"),
    ("dir=FILES/run", "FILES/run/config.yaml cannot be read (while parsing a flow node expected the"),
    ("dir=\x00", "\\x00 is not a folder; name that of a sweep, such as multirun/DATE/TIME"),
    ("dir=a\nb", "a b is not a folder; name that of a sweep, such as multirun/DATE/TIME"),
    (("dir=FILES/folder", "margin=0"), "margin=0 must be greater than 0"),
    (("dir=FILES/folder", "margin=nan"), "margin=nan must be a finite number"),
    (("dir=FILES/folder", "margin=inf"), "margin=inf must be a finite number"),
    (("dir=FILES/folder", "margin=x"), "margin='x' must be a valid number"),
    (("dir=FILES/folder", "margin=true"), "margin=true must be a valid number"),
    (("dir=FILES/folder", "which=last"), "which=last must be 'final' or 'best'"),
    (("dir=FILES/folder", "which=1"), "which=1 must be 'final' or 'best'"),
    (("dir=FILES/folder", "which=[]"), "which=[] must be 'final' or 'best'"),
    (("dir=FILES/folder", "baseline=[]"), "baseline=[] must be a valid string"),
    (("dir=FILES/folder", "out=a", "publish=b"), "out=a excludes publish=b; use one of them"),
    (("dir=FILES/folder", "out=[]"), "out=[] must be a valid string"),
    (
        ("dir=FILES/folder", "out=FILES/text.txt"),
        "FILES/folder holds neither a sweep.json with runs nor a run with config.yaml; name",
    ),
    ("~dir", "Could not delete from config. 'dir' does not exist."),
    ("~which", "Could not delete from config. 'which' does not exist."),
    ("directory=x", "there is no setting directory; see python script.py --help"),
    ("+dir=x", "x is not a folder; name that of a sweep, such as multirun/DATE/TIME"),
    ("margin", "cannot read 'margin'; settings are written key=value"),
    ("-m", "-m starts a grid of training runs, which python script.py cannot; leave it out"),
    ("model=nano", "Could not override 'model'. No match in the defaults list.: To append to your"),
]


@pytest.mark.parametrize(("arguments", "message"), SCALING, ids=name_of)
def test_scaling_refuses(refused, arguments, message):
    refused("scaling", arguments, message)


@pytest.mark.parametrize(("arguments", "message"), REPORT, ids=name_of)
def test_report_refuses(refused, arguments, message):
    refused("report", arguments, message)
