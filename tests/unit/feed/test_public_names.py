"""Public names of the feed."""

import onebox.feed


def test_public_names():
    assert onebox.feed.__all__ == [
        "Data",
        "DataSet",
        "Feed",
        "Position",
        "Source",
        "Split",
        "Stream",
        "as_source",
        "load_dataset",
        "open_dataset",
    ]
