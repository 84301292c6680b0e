#!/usr/bin/env bash
# lost_training_host.sh FLAG...: on lab1, a training of a rank on each of three hosts, of which the last loses its network.
# $LOSS is what happens to it: `network`, or `killed` for its rank alone. Prints as lost_host.sh does.
cd $ROOT
python -m hybrid_imagenet run -np 3 -H $HOSTS --network-interfaces eth0 -- "$@" >$FOLDER/log 2>&1 &
job=$!
until grep -q '"step": [1-9][0-9]' $FOLDER/run/metrics.jsonl 2>/dev/null; do sleep 0.1; kill -0 $job || break; done
case $LOSS in
  network) ssh lab3 ip link set eth0 down & ;;
  killed) ssh lab3 'kill -9 $(pgrep -n -f [b]in/python.*hybrid_imagenet.main)' ;;
esac
wait $job
echo code $?
for host in lab1 lab2; do
  echo left $(ssh $host ps ax | grep -c '[h]ybrid_imagenet.main\|[o]rted\|[m]pirun\|[h]orovodrun')
done
cat $FOLDER/log
