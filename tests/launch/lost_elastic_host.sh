#!/usr/bin/env bash
# lost_elastic_host.sh FLAG...: the same for an elastic job, whose discovery script does what odd.sh says from then on.
cd $ROOT
printf '#!/bin/sh\n[ ! -e %s ] || %s\nprintf "lab%%s:1\\n" 1 2 3\n' $FOLDER/cut $FOLDER/odd.sh >$FOLDER/hosts.sh
chmod +x $FOLDER/*.sh
python -m hybrid_imagenet run -np 3 --min-np 2 --host-discovery-script $FOLDER/hosts.sh \
  --module tests.resilience.noted_rank -- "$@" --stall_seconds=60 >$FOLDER/log 2>&1 &
job=$!
until grep -q '"step": [1-9][0-9]' $FOLDER/run/metrics.jsonl 2>/dev/null; do sleep 0.1; kill -0 $job || break; done
touch $FOLDER/cut
ssh lab3 ip link set eth0 down &
began=$SECONDS
until grep -q '"ranks"' $FOLDER/run/metrics.jsonl; do sleep 0.1; kill -0 $job || break; done
echo went on after $((SECONDS - began)) s
wait $job
echo code $?
for host in lab1 lab2; do echo left $(ssh $host ps ax | grep -c '[n]oted_rank\|[g]loo_launch'); done
cat $FOLDER/log
