"""What holds for every test and notebook."""


def pytest_collectstart(collector):
    """Notebooks: progress bars and warnings go to stderr and differ from run to run, so it is not compared."""
    if getattr(collector, "path", None) and collector.path.suffix == ".ipynb":
        collector.skip_compare += ("stderr",)
