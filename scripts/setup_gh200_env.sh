# Set the default environment variables for machines with unified memory. Source this file:
#
#   source scripts/setup_gh200_env.sh
#
# Existing values are kept: set GH200_UVM_OVERSUBSCRIPTION_RATIO or GH200_UVM_ACCESS_PATTERN before
# sourcing to use other values. Sourcing it twice changes nothing. `gracetune env` explains each
# variable, and `gracetune env --export` prints the same lines. Works in any POSIX shell with any
# options, and leaves no helper function or variable behind.

# Print the value of a key in PYTORCH_CUDA_ALLOC_CONF, if it is set.
_gracetune_conf_value() {
    printf '%s' "${PYTORCH_CUDA_ALLOC_CONF:-}" | tr ',' '\n' | sed -n "s/^ *$1 *: *//p" | tail -n 1
}

# Print PYTORCH_CUDA_ALLOC_CONF without the three keys that are set below.
_gracetune_conf_rest() {
    printf '%s' "${PYTORCH_CUDA_ALLOC_CONF:-}" \
        | sed -E 's/(^|,) *(use_uvm|uvm_oversubscription_ratio|uvm_access_pattern) *:[^,]*/\1/g; s/,+/,/g; s/^,//; s/,$//'
}

export SIMPLETUNER_GH200_ENABLE_UVM_HINTS="${SIMPLETUNER_GH200_ENABLE_UVM_HINTS:-${AITK_GH200_ENABLE_UVM_HINTS:-1}}"
export AITK_GH200_ENABLE_UVM_HINTS="${AITK_GH200_ENABLE_UVM_HINTS:-$SIMPLETUNER_GH200_ENABLE_UVM_HINTS}"

_gracetune_ratio="$(_gracetune_conf_value uvm_oversubscription_ratio)"
_gracetune_pattern="$(_gracetune_conf_value uvm_access_pattern)"
export GH200_UVM_OVERSUBSCRIPTION_RATIO="${GH200_UVM_OVERSUBSCRIPTION_RATIO:-${_gracetune_ratio:-5.0}}"
export GH200_UVM_ACCESS_PATTERN="${GH200_UVM_ACCESS_PATTERN:-${_gracetune_pattern:-gpu_first}}"

_gracetune_rest="$(_gracetune_conf_rest)"
export PYTORCH_CUDA_ALLOC_CONF="use_uvm:True,uvm_oversubscription_ratio:${GH200_UVM_OVERSUBSCRIPTION_RATIO},uvm_access_pattern:${GH200_UVM_ACCESS_PATTERN}${_gracetune_rest:+,$_gracetune_rest}"

export ACCELERATE_MIXED_PRECISION="${ACCELERATE_MIXED_PRECISION:-bf16}"

unset _gracetune_ratio _gracetune_pattern _gracetune_rest
unset -f _gracetune_conf_value _gracetune_conf_rest

cat <<END
[setup_gh200_env] exported:
  SIMPLETUNER_GH200_ENABLE_UVM_HINTS=$SIMPLETUNER_GH200_ENABLE_UVM_HINTS
  AITK_GH200_ENABLE_UVM_HINTS=$AITK_GH200_ENABLE_UVM_HINTS
  GH200_UVM_OVERSUBSCRIPTION_RATIO=$GH200_UVM_OVERSUBSCRIPTION_RATIO
  GH200_UVM_ACCESS_PATTERN=$GH200_UVM_ACCESS_PATTERN
  PYTORCH_CUDA_ALLOC_CONF=$PYTORCH_CUDA_ALLOC_CONF
  ACCELERATE_MIXED_PRECISION=$ACCELERATE_MIXED_PRECISION
gracetune removes its own keys from PYTORCH_CUDA_ALLOC_CONF before torch starts. Other programs with
a stock torch do not start with these keys: unset the variable for them.
END
