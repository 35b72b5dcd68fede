"""What lies in a run's folder of checkpoints, and what is made of the remains of killed saves."""
from mrl.trainer.files import checkpoint_dir, saved_steps, tidy_checkpoints


def leave(folder, **files: str) -> None:
    """Directories with one file each, by name; a dot in the name is written as two underscores."""
    for name, content in files.items():
        directory = folder / "checkpoints" / name.replace("__", ".")
        directory.mkdir(parents=True)
        (directory / "meta.json").write_text(content)


def test_remains_of_killed_saves_go_and_no_checkpoint_is_lost(tmp_path):
    tidy_checkpoints(tmp_path)  # there is no folder yet
    leave(tmp_path, step_000002="two", step_000004="four", step_000004__old="before", step_000006__old="six",
          step_000006__tmp="new", step_000008__tmp="half")
    assert saved_steps(tmp_path) == [2, 4]
    tidy_checkpoints(tmp_path)
    assert saved_steps(tmp_path) == [2, 4, 6]
    assert [(checkpoint_dir(tmp_path, step) / "meta.json").read_text() for step in (2, 4, 6)] == ["two", "four", "six"]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 3
