#!/usr/bin/env bash
# Runs on lab1: a job with one rank on each of three hosts, of which the last one loses its network. Prints the exit code,
# the duration in seconds, and the number of processes that remain on the two other hosts. The command that starts the
# ranks is in the variable $START. As an argument it would be found when remaining processes are searched by their words.
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
