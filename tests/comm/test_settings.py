"""The settings of a communicator and the options of its all-reduce."""

import pytest

from hybrid_imagenet.comm.settings import (
    ALGORITHMS,
    AllReduceOptions,
    CommunicationSettings,
    GridOptions,
    SizeOptions,
)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_settings_without_options_have_the_defaults_of_their_algorithm(name):
    settings = CommunicationSettings(allreduce=name)
    assert settings.options == ALGORITHMS[name].options()
    assert type(settings.options) is ALGORITHMS[name].options


def test_settings_with_options_of_another_algorithm_are_rejected():
    assert CommunicationSettings(allreduce="torus", options=GridOptions("2x1")) == (
        CommunicationSettings(allreduce="torus").with_options({"torus_grid": "2x1"})
    )
    with pytest.raises(ValueError, match="not of allreduce=ring"):
        CommunicationSettings(allreduce="ring", options=GridOptions("2x1"))
    with pytest.raises(ValueError, match="not of allreduce=torus"):
        CommunicationSettings(allreduce="torus", options=SizeOptions())


def test_with_options_of_an_unknown_name_is_rejected():
    settings = CommunicationSettings(allreduce="ring")
    assert settings.with_options({}).options == AllReduceOptions()
    with pytest.raises(ValueError, match="torus_grid: there is no such option with allreduce=ring"):
        settings.with_options({"torus_grid": "2x1"})
