"""Upload an exported folder to the Hugging Face Hub."""

from pathlib import Path

from compressive.exporting.destination import RECORD


def require_token() -> None:
    """Raise ValueError if no token of the Hub is stored here."""
    from huggingface_hub import get_token

    if not get_token():
        hint = "run `hf auth login`, or set HF_TOKEN"
        raise ValueError(f"--push needs a token of the Hugging Face Hub with write access; {hint}")


def push_folder(folder: Path, repo: str) -> str:
    """Create the repository if necessary, upload all files in one commit, return its address."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        address = api.create_repo(repo, exist_ok=True)
        # The record names local paths; the model card has the measured difference.
        options = {"commit_message": "Upload encoder", "ignore_patterns": [RECORD]}
        api.upload_folder(repo_id=repo, folder_path=folder, **options)
    except Exception as error:  # of the connection, the server and the names
        # The first line of the Hub's errors is often only their kind.
        reason = " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
        raise ValueError(f"--push {repo} failed: {reason}; the export is in {folder}") from None
    return str(address)
