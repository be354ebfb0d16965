"""A miniature clone of ai-toolkit with everything that is hooked; it runs, but trains nothing."""

import subprocess
from pathlib import Path
from textwrap import dedent

FILES = {
    "run.py": """
        import json
        import os
        import sys

        started = {"arguments": sys.argv[1:], "cwd": os.getcwd(), "environment": dict(os.environ)}
        print(json.dumps(started))
        """,
    "version.py": 'VERSION = "0.12.26"\n',
    ".gitignore": "__pycache__/\n",
    "extensions/example/__init__.py": "AI_TOOLKIT_EXTENSIONS = []\n",
    "toolkit/__init__.py": "",
    "toolkit/extension.py": """
        import importlib
        import os
        import pkgutil

        ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


        class Extension:
            uid = None

            @classmethod
            def get_process(cls):
                pass


        def get_all_extensions():
            extension_folders = ["extensions", "extensions_built_in"]
            found = []
            for folder in extension_folders:
                for _, name, _ in pkgutil.iter_modules([os.path.join(ROOT, folder)]):
                    module = importlib.import_module(f"{folder}.{name}")
                    found += getattr(module, "AI_TOOLKIT_EXTENSIONS", [])
            return found


        def get_all_extensions_process_dict():
            return {each.uid: each.get_process() for each in get_all_extensions()}
        """,
    "toolkit/config_modules.py": """
        class TrainConfig:
            def __init__(self, **kwargs):
                self.optimizer = kwargs.get("optimizer", "adamw")
                self.optimizer_params = kwargs.get("optimizer_params", {})
                self.lr = kwargs.get("lr", 1e-6)
                self.timestep_type = kwargs.get("timestep_type", "sigmoid")
                self.merge_network_on_save = False


        class DatasetConfig:
            def __init__(self, **kwargs):
                self.folder_path = kwargs.get("folder_path")
                self.resolution = kwargs.get("resolution", 512)
                self.num_workers = kwargs.get("num_workers", 0)
                self.cache_latents = kwargs.get("cache_latents", False)
                self.cache_latents_to_disk = kwargs.get("cache_latents_to_disk", False)
                self.augments = kwargs.get("augments", [])
                self.augmentations = kwargs.get("augmentations")
                if self.augments or self.augmentations:
                    self.cache_latents = self.cache_latents_to_disk = False


        def preprocess_dataset_raw_config(raw_config):
            found = []
            for each in raw_config:
                given = each.get("resolution", 512)
                for edge in given if isinstance(given, list) else [given]:
                    found.append({**each, "resolution": edge})
            return found
        """,
    "toolkit/network_mixins.py": """
        class ToolkitNetworkMixin:
            def get_all_modules(self):
                return self.modules
        """,
    "toolkit/samplers/__init__.py": "",
    "toolkit/samplers/custom_flowmatch_sampler.py": """
        import torch


        class CustomFlowMatchEulerDiscreteScheduler:
            def set_train_timesteps(
                self, num_timesteps, device, timestep_type="linear", latents=None, patch_size=1
            ):
                drawn = 1000 * torch.sigmoid(torch.randn(num_timesteps))
                self.timesteps = torch.sort(drawn, descending=True).values
        """,
    "toolkit/prompt_utils.py": """
        from safetensors.torch import load_file


        class PromptEmbeds:
            def __init__(self, text_embeds):
                self.text_embeds = text_embeds

            @classmethod
            def load(cls, path):
                return cls(load_file(path, device='cpu')["text_embed"])
        """,
    "toolkit/dataloader_mixins.py": """
        import hashlib
        import json
        import os

        import cv2
        import torch
        from PIL import Image
        from safetensors.torch import load_file, save_file

        from toolkit.prompt_utils import PromptEmbeds


        class CaptionProcessingDTOMixin:
            def load_caption(self):
                prompt_path = os.path.splitext(self.path)[0] + ".txt"
                with open(prompt_path, 'r', encoding='utf-8') as f:
                    self.caption = f.read()


        class ImageProcessingDTOMixin:
            def load_and_process_image(self):
                if self.is_text_embedding_cached:
                    self.load_prompt_embedding()
                if self.is_latent_cached:
                    self.get_latent()
                    return
                with Image.open(self.path) as image:
                    self.image = image.convert("RGB")

            def load_and_process_video(self):
                return cv2.VideoCapture(self.path)


        class LatentCachingFileItemDTOMixin:
            def get_latent_info_dict(self):
                return {"filename": os.path.basename(self.path)}

            def get_latent_path(self, recalculate=False):
                if self._latent_path is None or recalculate:
                    text = json.dumps(self.get_latent_info_dict(), sort_keys=True)
                    name = hashlib.md5(text.encode()).hexdigest() + ".safetensors"
                    folder = os.path.join(os.path.dirname(self.path), "_latent_cache")
                    self._latent_path = os.path.join(folder, name)
                return self._latent_path

            def get_latent(self):
                if self._encoded_latent is None:
                    self._encoded_latent = load_file(self.get_latent_path(), device='cpu')["latent"]
                return self._encoded_latent


        class TextEmbeddingFileItemDTOMixin:
            is_text_embedding_cached = False

            def get_text_embedding_path(self):
                folder = os.path.join(os.path.dirname(self.path), "_t_e_cache")
                return os.path.join(folder, "text.safetensors")

            def load_prompt_embedding(self):
                te_path = self.get_text_embedding_path()
                self.prompt_embeds = PromptEmbeds.load(te_path)


        class LatentCachingMixin:
            num_encoded = 0

            def cache_latents_all_latents(self):
                for prep_item in self.file_list:
                    path = prep_item.get_latent_path(recalculate=True)
                    if not os.path.exists(path):
                        prep_item.load_and_process_image()
                        os.makedirs(os.path.dirname(path), exist_ok=True)
                        save_file({"latent": torch.full((4,), float(self.num_encoded))}, path)
                        self.num_encoded += 1
                    prep_item.is_latent_cached = prep_item.is_caching_to_disk = True
        """,
    "toolkit/data_transfer_object/__init__.py": "",
    "toolkit/data_transfer_object/data_loader.py": """
        import cv2
        from PIL import Image

        from toolkit.dataloader_mixins import (
            CaptionProcessingDTOMixin,
            ImageProcessingDTOMixin,
            LatentCachingFileItemDTOMixin,
            TextEmbeddingFileItemDTOMixin,
        )


        class FileItemDTO(
            LatentCachingFileItemDTOMixin,
            TextEmbeddingFileItemDTOMixin,
            CaptionProcessingDTOMixin,
            ImageProcessingDTOMixin,
        ):
            def __init__(self, path, dataset_config):
                self.path = path
                self.dataset_config = dataset_config
                self.is_latent_cached = self.is_caching_to_disk = False
                self._encoded_latent = self._latent_path = None
                with Image.open(self.path) as image:
                    self.width, self.height = image.size
        """,
    "toolkit/data_loader.py": """
        import copy
        import glob
        import os

        from toolkit.data_transfer_object.data_loader import FileItemDTO
        from toolkit.dataloader_mixins import LatentCachingMixin


        class AiToolkitDataset(LatentCachingMixin):
            def __init__(self, dataset_config):
                self.dataset_config = dataset_config
                self.epoch_num = 0
                paths = sorted(glob.glob(os.path.join(dataset_config.folder_path, "*.png")))
                self.file_list = [FileItemDTO(path, dataset_config) for path in paths]
                self.setup_epoch()

            def setup_epoch(self):
                if self.epoch_num == 0 and self.dataset_config.cache_latents_to_disk:
                    self.cache_latents_all_latents()
                self.epoch_num += 1

            def __getitem__(self, index):
                item = copy.deepcopy(self.file_list[index])
                item.load_and_process_image()
                item.load_caption()
                return item


        def trigger_dataloader_setup_epoch(dataloader):
            for sub_dataset in dataloader:
                sub_dataset.setup_epoch()
        """,
    "jobs/__init__.py": "from jobs.BaseJob import BaseJob\n",
    "jobs/BaseJob.py": """
        class BaseJob:
            def __init__(self, config):
                self.config = config["config"]
                self.name = self.config["name"]

            def load_processes(self, process_dict):
                self.process = [
                    process_dict[each["type"]](i, self, each)
                    for i, each in enumerate(self.config["process"])
                ]
        """,
    "jobs/ExtensionJob.py": """
        from jobs import BaseJob
        from toolkit.extension import get_all_extensions_process_dict


        class ExtensionJob(BaseJob):
            def __init__(self, config):
                super().__init__(config)
                self.process_dict = get_all_extensions_process_dict()
                self.load_processes(self.process_dict)
        """,
    "jobs/process/__init__.py": "",
    "jobs/process/BaseSDTrainProcess.py": """
        import os
        from types import SimpleNamespace

        import torch

        from toolkit.config_modules import (
            DatasetConfig,
            TrainConfig,
            preprocess_dataset_raw_config,
        )
        from toolkit.data_loader import AiToolkitDataset
        from toolkit.optimizer import get_optimizer


        class BaseSDTrainProcess:
            def __init__(self, process_id, job, config, custom_pipeline=None):
                self.job, self.config = job, config
                self.train_config = TrainConfig(**self.get_conf('train', {}))
                self.network_config = SimpleNamespace(split_multistage_loras=True)
                self.accelerator = SimpleNamespace(is_main_process=True)
                self.save_root = self.get_conf("training_folder", "")
                self.named_lora = False
                self.network = None
                self.current_boundary_index = 0
                self.dataset_configs = []
                raw_datasets = self.get_conf('datasets', [])
                raw_datasets = preprocess_dataset_raw_config(raw_datasets)
                for raw_dataset in raw_datasets:
                    dataset = DatasetConfig(**raw_dataset)
                    self.dataset_configs.append(dataset)

            def get_conf(self, key, default=None):
                return self.config.get(key, default)

            def before_dataset_load(self):
                pass

            def hook_add_extra_train_params(self, params):
                return params

            def hook_before_train_loop(self):
                pass

            def run(self, sd, network):
                self.sd, self.network = sd, network
                params = [{"params": list(network.parameters()), "lr": self.train_config.lr}]
                params = self.hook_add_extra_train_params(params)
                self.params = params
                optimizer_type = self.train_config.optimizer.lower()
                self.optimizer = get_optimizer(
                    self.params,
                    optimizer_type,
                    learning_rate=self.train_config.lr,
                    optimizer_params=self.train_config.optimizer_params,
                )
                self.before_dataset_load()
                self.data_loader = [AiToolkitDataset(each) for each in self.dataset_configs]
                self.hook_before_train_loop()

            def process_general_training_batch(self, batch):
                latents = batch.latents
                self.sd.noise_scheduler.set_train_timesteps(
                    1000, device="cpu", timestep_type="sigmoid", latents=latents, patch_size=1
                )
                boundaries = [1] + self.sd.multistage_boundaries
                high = boundaries[self.current_boundary_index]
                low = boundaries[self.current_boundary_index + 1]
                asc = torch.flip(self.sd.noise_scheduler.timesteps, dims=[0])
                lo = len(asc) - torch.searchsorted(asc, torch.tensor(high * 1000), right=False)
                hi = len(asc) - torch.searchsorted(asc, torch.tensor(low * 1000), right=True)
                first = max(int(lo) - 1, 0)
                window = self.sd.noise_scheduler.timesteps[first:int(hi)]
                return latents, None, window, [], None

            def save(self, step=None):
                step_num = "" if step is None else f"_{str(step).zfill(9)}"
                lora_name = self.job.name
                filename = f'{lora_name}{step_num}.safetensors'
                self.network.save_weights(os.path.join(self.save_root, filename))
        """,
    "toolkit/optimizer.py": """
        import torch


        def get_optimizer(params, optimizer_type='adam', learning_rate=1e-6, optimizer_params=None):
            return torch.optim.AdamW(params, lr=learning_rate, **(optimizer_params or {}))
        """,
    "extensions_built_in/sd_trainer/__init__.py": """
        from toolkit.extension import Extension


        class SDTrainerExtension(Extension):
            uid = "sd_trainer"

            @classmethod
            def get_process(cls):
                from .SDTrainer import SDTrainer

                return SDTrainer


        class Merger:
            def __init__(self, *args):
                pass


        class MergeExtension(Extension):
            uid = "merge"

            @classmethod
            def get_process(cls):
                return Merger


        AI_TOOLKIT_EXTENSIONS = [SDTrainerExtension, MergeExtension]
        """,
    "extensions_built_in/sd_trainer/SDTrainer.py": """
        from jobs.process.BaseSDTrainProcess import BaseSDTrainProcess


        class SDTrainer(BaseSDTrainProcess):
            def __init__(self, process_id, job, config, **kwargs):
                super().__init__(process_id, job, config, **kwargs)

            def train_single_accumulation(self, batch):
                return self.process_general_training_batch(batch)
        """,
}


def write_files(root: Path) -> Path:
    """Write the files of the clone."""
    for name, text in FILES.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dedent(text).lstrip("\n"))
    return root


def write_clone(root: Path) -> Path:
    """Write the files and commit them to a new repository."""
    write_files(root)
    git(root, "init", "-q")
    git(root, "add", ".")
    who = ("-c", "user.name=n", "-c", "user.email=n@example.org")
    git(root, *who, "commit", "-qm", "one")
    return root


def git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def status(root: Path) -> str:
    """Return everything that differs from the commit, including ignored files."""
    return git(root, "status", "--porcelain", "--ignored")
