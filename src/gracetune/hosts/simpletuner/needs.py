"""The symbols of SimpleTuner that are hooked: they held from 3.0 on, while bodies changed daily."""

from __future__ import annotations

from gracetune.hosts.probe import Need, Site

TRAINER = "simpletuner.helpers.training.trainer"
FACTORY = "simpletuner.helpers.data_backend.factory"
LOCAL = "simpletuner.helpers.data_backend.local"
BUILDER = "simpletuner.helpers.data_backend.builders.local"
JSON = "simpletuner.helpers.configuration.json_file"
TOML = "simpletuner.helpers.configuration.toml_file"
AUDIO = "simpletuner.helpers.audio.load"
TRACKER = "simpletuner.helpers.training.state_tracker"
KEEPER = "simpletuner.simpletuner_sdk.process_keeper"
FIELD_REGISTRY = "simpletuner.simpletuner_sdk.server.services.field_registry.registry"
FIELD_TYPES = "simpletuner.simpletuner_sdk.server.services.field_registry.types"
CONFIG_STORE = "simpletuner.simpletuner_sdk.server.services.config_store"
TRAINING = "simpletuner.simpletuner_sdk.server.services.training_service"

_READS = (
    Site(LOCAL, "LocalDataBackend.torch_load", "self.exists(filename)"),
    Site("simpletuner.helpers.caching.vae", "", "self.cache_data_backend.torch_load"),
    Site("simpletuner.helpers.caching.text_embeds", "", "self.data_backend.torch_load"),
)

NEEDS = (
    Need(
        JSON,
        "mapping_to_cli_args",
        "takes our blocks out of config.json before they are dropped",
        sites=(Site(JSON, "load_json_config", "mapping_to_cli_args"),),
    ),
    Need(
        TOML,
        "mapping_to_cli_args",
        "the same for config.toml",
        sites=(Site(TOML, "load_toml_config", "mapping_to_cli_args"),),
    ),
    Need(
        FACTORY,
        "FactoryRegistry.load_configuration",
        "reads `type: in_memory` as a local data set, and remembers its block",
        sites=(Site(FACTORY, "", "self.load_configuration()"),),
    ),
    Need(
        FACTORY,
        "LocalDataBackend",
        "is asked for when a local backend is made: ours is put there",
        sites=(
            Site(
                BUILDER,
                "LocalBackendBuilder._create_backend",
                "getattr(factory_module, 'LocalDataBackend', None)",
            ),
        ),
    ),
    Need(
        LOCAL,
        "LocalDataBackend",
        "is what our backend extends",
        accepts=("accelerator", "id", "compress_cache"),
    ),
    Need(LOCAL, "LocalDataBackend.read", "is served from memory", ("filepath", "as_byteIO")),
    Need(LOCAL, "LocalDataBackend.write", "is written through", ("filepath", "data")),
    Need(LOCAL, "LocalDataBackend.delete", "is passed on, and forgotten here", ("filepath",)),
    Need(LOCAL, "LocalDataBackend.exists", "is answered from memory", ("filepath",)),
    Need(LOCAL, "LocalDataBackend.open_file", "is served from memory", ("filepath", "mode")),
    Need(
        LOCAL,
        "LocalDataBackend.torch_load",
        "is where both caches read: served from memory",
        ("filename",),
        sites=_READS,
    ),
    Need(
        LOCAL,
        "load_image",
        "decodes pictures, from memory too",
        sites=(Site(LOCAL, "LocalDataBackend.read_image", "load_image"),),
    ),
    Need(
        LOCAL,
        "load_video",
        "decodes videos, from memory too",
        sites=(Site(LOCAL, "LocalDataBackend.read_image", "load_video"),),
    ),
    Need(
        AUDIO,
        "load_audio",
        "decodes sound, from memory too",
        takes=("source",),
        sites=(Site("simpletuner.helpers.audio", "__getattr__", "getattr(load, name)"),),
    ),
    Need(
        TRAINER,
        "Trainer.__init__",
        "is when accelerator and configuration are there",
        accepts=("config", "disable_accelerator"),
    ),
    Need(
        TRAINER,
        "Trainer.prepare_batch",
        "is when a batch is ready to be placed",
        takes=("batch",),
        sites=(Site(TRAINER, "Trainer.train", "self.prepare_batch(raw_batch)"),),
    ),
    Need(
        TRAINER,
        "Trainer.train",
        "accumulates gradients by the accelerator, which the ramp sets",
        sites=(
            Site(TRAINER, "Trainer.train", "self.accelerator.accumulate"),
            Site(TRAINER, "Trainer.train", "self.accelerator.sync_gradients"),
        ),
    ),
    Need(TRACKER, "StateTracker", "shows our configuration to whoever asks"),
)

WEBUI_NEEDS = (
    Need(
        FIELD_TYPES,
        "ConfigField",
        "is what our options become",
        accepts=(
            *("name", "arg_name", "ui_label", "field_type", "tab", "section", "default_value"),
            *("choices", "help_text", "tooltip", "importance", "order"),
        ),
    ),
    Need(
        FIELD_REGISTRY,
        "FieldRegistry._add_field",
        "takes our fields",
        takes=("field",),
        sites=(Site(FIELD_REGISTRY, "", "FieldRegistry()"),),
    ),
    Need(FIELD_REGISTRY, "field_registry", "is the one that the WebUI asks"),
    Need(CONFIG_STORE, "ConfigStore.load_config", "unfolds our blocks into fields", ("name",)),
    Need(
        CONFIG_STORE,
        "ConfigStore.save_config",
        "folds our fields into blocks",
        ("name", "config"),
    ),
    Need(
        CONFIG_STORE,
        "ConfigStore.save_trainer_config",
        "folds our fields into blocks, and keeps what has no field",
        ("name", "config"),
        sites=(Site(TRAINING, "persist_config_bundle", "store.save_trainer_config"),),
    ),
    Need(
        CONFIG_STORE,
        "ConfigStore.validate_config",
        "refuses what a job would die of",
        ("config",),
        sites=(Site(TRAINING, "validate_training_config", "store.validate_config"),),
    ),
    Need(
        KEEPER,
        "submit_job",
        "starts jobs: through our entry",
        ("job_id", "func", "config"),
        sites=(Site(TRAINING, "start_training_job", "process_keeper.submit_job"),),
    ),
    Need(
        TRAINER,
        "run_trainer_job",
        "gives accelerate our entry, before the script",
        ("config",),
        sites=(
            Site(TRAINER, "run_trainer_job", "shlex.split(str(accelerate_extra_args))"),
            Site(TRAINER, "run_trainer_job", "cmd.extend(extra_args)"),
        ),
    ),
)
