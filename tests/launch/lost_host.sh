#!/usr/bin/env bash
# On lab1: a job of a rank on each of three hosts, of which the last loses its network. Prints the exit code, the seconds
# that it took, and what is left on the two others. $START is the command that starts ranks, not an argument: what is left
# is looked for by the words of command lines.
cd $ROOT
eval "$START -- $FOLDER launched 3 --stall_timeout=4" >$FOLDER/log 2>&1 &
job=$!
until [ -e $FOLDER/training-0 ]; do sleep 0.1; kill -0 $job || break; done
ssh lab3 ip link set eth0 down &
began=$SECONDS
wait $job
echo code $? after $((SECONDS - began)) s
for host in lab1 lab2; do
  echo left $(ssh $host ps ax | grep -c '[w]atched_rank\|[o]rted\|[m]pirun\|[h]orovodrun')
done
cat $FOLDER/log
